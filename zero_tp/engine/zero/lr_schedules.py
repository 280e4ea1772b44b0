"""Build learning rate schedules of DeepSpeed and transformers, and set them to a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch.optim.lr_scheduler import LambdaLR

from zero_tp.base.settings.schedule import TRANSFORMERS_SCHEDULES

ONE_STEP_AHEAD = (lr_schedules.LRRangeTest, lr_schedules.OneCycle)
"""Schedules whose formulas use `last_batch_iteration + 1`; others use it as it is."""


def transformers_schedule(block: dict[str, Any] | None) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """Return a factory of the transformers schedule that a `scheduler` block names; None for other schedules.

    After `num_training_steps` the rate stays constant; transformers' cosine would rise again.
    """
    if block is None or block["type"] not in TRANSFORMERS_SCHEDULES:
        return None
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(block["type"])]
    params = block.get("params", {})

    def make(optimizer: torch.optim.Optimizer) -> LambdaLR:
        schedule: LambdaLR = function(optimizer, **params)
        if "num_training_steps" in params:
            last = params["num_training_steps"]
            schedule.lr_lambdas = [functools.partial(_hold_last_rate, rate, last) for rate in schedule.lr_lambdas]
        return schedule

    return make


def _hold_last_rate(rate: Callable[[int], float], last: int, step: int) -> float:
    return rate(min(step, last))


def set_schedule(schedule: Any, updates: int, *, native_start: bool = False) -> None:
    """Set a schedule and the learning rates for the next step: the k-th update gets the schedule's value at k.

    DeepSpeed starts its schedules at iteration -1 and advances them after each step: the first two steps of a warm-up
    from 0 have no effect.

    Args:
        updates: number of steps that have updated the weights.
        native_start: keep the start of DeepSpeed's schedules, as transformers' Trainer under DeepSpeed does.
    """
    if native_start:
        if updates > 0:  # the constructor has set the first rate, and `OneCycle` first betas of its own
            schedule.step(updates - 1)
    elif isinstance(schedule, LambdaLR):
        # A count above 1 keeps torch from warning that the optimizer has not stepped.
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": updates, "_step_count": updates + 2})
        schedule.step()
    else:
        schedule.step(updates if isinstance(schedule, ONE_STEP_AHEAD) else updates + 1)


class _RateOnly(torch.optim.Optimizer):
    """An optimizer without parameters. `Optimizer.__init__` would import torch's compiler: seconds."""

    def __init__(self, rate: float) -> None:
        self.param_groups = [{"lr": rate, "betas": (0.5, 0.5), "params": []}]
        self.defaults = {"lr": rate}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def rates(block: dict[str, Any], rate: float, steps: Iterable[int]) -> list[float]:
    """Return the learning rates of the steps `steps` of a run.

    Args:
        block: `scheduler` of a config.
        rate: `optimizer.params.lr`.
    """
    optimizer = _RateOnly(rate)
    make_schedule, params = transformers_schedule(block), block.get("params", {})
    if make_schedule is None:
        if block["type"] == "OneCycle":
            params = {**params, "cycle_momentum": False}  # it would set the betas of an Adam
        make_schedule = functools.partial(getattr(lr_schedules, block["type"]), **params)
    schedule: Any = make_schedule(optimizer)
    values = []
    for step in steps:
        set_schedule(schedule, step - 1)
        values.append(float(optimizer.param_groups[0]["lr"]))
    return values
