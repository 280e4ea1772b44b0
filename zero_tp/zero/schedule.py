"""Step k of a run, counted from 1, trains at the value that its schedule has at k.

DeepSpeed makes a schedule at iteration -1 and moves it on after each step, so that a warm-up from 0 would leave the
first two steps without effect. Here it stands at its first iteration before the first step. A checkpoint keeps the
iteration: a run that was begun before goes on with the schedule that it has.
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle

COUNTING_ONE_MORE = (LRRangeTest, OneCycle)
"""Schedules whose formulas take `last_batch_iteration + 1`; those of the others take it as it is."""


def begin(schedule: Any) -> None:
    """Bring a new schedule to the first step, k = 1, and the optimizer to its rates."""
    schedule.step(0 if isinstance(schedule, COUNTING_ONE_MORE) else 1)


def restore(schedule: Any, state: dict[str, Any]) -> None:
    """Bring a schedule to a saved state, and the optimizer to its rates and, under OneCycle, its betas."""
    schedule.load_state_dict(state)
    schedule.step(schedule.last_batch_iteration)
