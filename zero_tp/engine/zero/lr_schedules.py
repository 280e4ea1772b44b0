"""Build learning rate schedules of transformers, and of stages of a run, and set them to a step.

DeepSpeed makes its own schedules of the run from its dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime import lr_schedules as deepspeed_schedules
from torch.optim.lr_scheduler import LambdaLR

from zero_tp.base.settings.schedule import TRANSFORMERS_SCHEDULES, Schedule

ONE_STEP_AHEAD = (deepspeed_schedules.LRRangeTest, deepspeed_schedules.OneCycle)
"""Schedules whose formulas use `last_batch_iteration + 1`; others use it as it is."""


def transformers_schedule(
    schedule: Schedule | None,
) -> Callable[[torch.optim.Optimizer], LambdaLR] | None:
    """Return a factory of the transformers schedule that a `scheduler` block names; None for other
    schedules.

    After `num_training_steps` the rate stays constant; transformers' cosine would rise again.
    """
    if schedule is None or schedule.type not in TRANSFORMERS_SCHEDULES:
        return None
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, SchedulerType

    function: Any = TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(schedule.type)]
    params = schedule.arguments

    def make(optimizer: torch.optim.Optimizer) -> LambdaLR:
        scheduler: LambdaLR = function(optimizer, **params)
        if "num_training_steps" in params:
            last = params["num_training_steps"]
            scheduler.lr_lambdas = [
                functools.partial(_hold_last_rate, rate, last) for rate in scheduler.lr_lambdas
            ]
        return scheduler

    return make


def _hold_last_rate(rate: Callable[[int], float], last: int, step: int) -> float:
    return rate(min(step, last))


def set_schedule(schedule: Any, updates: int, *, native_start: bool = False) -> None:
    """Set a schedule and the learning rates for the next step.

    The k-th update gets the schedule's value at k.

    DeepSpeed starts its schedules at iteration -1 and advances them after each step: the first two
    steps of a warm-up from 0 have no effect. WarmupLR, linear, to 1 in 4 steps:

        step                    1      2      3      4      5
        DeepSpeed's iteration   -1     0      1      2      3
        DeepSpeed's rate        0      0      1/4    2/4    3/4
        the rate here           1/4    2/4    3/4    1      1

    Args:
        updates: number of steps that have updated the weights.
        native_start: keep the start of DeepSpeed's schedules, as transformers' Trainer under
            DeepSpeed does.
    """
    if native_start:
        # The constructor has set the first rate, and `OneCycle` first betas of its own.
        if updates > 0:
            schedule.step(updates - 1)
    elif isinstance(schedule, LambdaLR):
        # A count above 1 keeps torch from warning that the optimizer has not stepped.
        schedule.load_state_dict(
            {**schedule.state_dict(), "last_epoch": updates, "_step_count": updates + 2}
        )
        schedule.step()
    else:
        # Both give the next step, number updates + 1, the schedule's value at updates + 1.
        schedule.step(updates if isinstance(schedule, ONE_STEP_AHEAD) else updates + 1)


def make_schedule(schedule: Schedule, optimizer: Any) -> Any:
    """Return a schedule object of DeepSpeed or transformers that sets an optimizer's rates."""
    make = transformers_schedule(schedule)
    if make is None:
        make = functools.partial(getattr(deepspeed_schedules, schedule.type), **schedule.arguments)
    return make(optimizer)


def scale_rates(schedule: Any, groups: Sequence[dict[str, Any]], factor: float = 1.0) -> None:
    """Multiply the rate of each group by its `lr_scale` and `factor`, now and at later steps.

    DeepSpeed's schedules write one rate into all groups. With scales of 1 and 1/2:

        the schedule's rate    0.1          0.2
        the groups' rates      0.1  0.05    0.2  0.1

    Args:
        schedule: of DeepSpeed or transformers; None: the rate is constant, or another schedule
            starts from what each group has now.
        factor: of a stage of the run.
    """
    scales = [factor * group.get("lr_scale", 1.0) for group in groups]
    if all(scale == 1.0 for scale in scales):
        return
    for group, scale in zip(groups, scales, strict=True):
        group["lr"] *= scale
    if isinstance(schedule, LambdaLR):
        pairs = zip(schedule.base_lrs, scales, strict=True)
        schedule.base_lrs = [rate * scale for rate, scale in pairs]
    elif schedule is not None:
        # What each step writes. Other attributes, such as WarmupLR's own list of rates by group,
        # do not exist in all five classes.
        unscaled_rates = schedule.get_lr

        def scaled_rates() -> list[float]:
            pairs = zip(unscaled_rates(), scales, strict=True)
            return [rate * scale for rate, scale in pairs]

        schedule.get_lr = scaled_rates


class _RateOnly(torch.optim.Optimizer):
    """An optimizer without parameters. `Optimizer.__init__` would import torch's compiler:
    seconds.
    """

    def __init__(self, rate: float) -> None:
        self.param_groups = [{"lr": rate, "betas": (0.5, 0.5), "params": []}]
        self.defaults = {"lr": rate}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def rates(schedule: Schedule | None, rate: float, steps: Iterable[int]) -> list[float]:
    """Return the learning rates of the steps `steps` of a run.

    Args:
        schedule: None: the rate is constant.
        rate: the optimizer's.
    """
    if schedule is None:
        return [rate for _ in steps]
    optimizer = _RateOnly(rate)
    if schedule.type == "OneCycle":
        # It would set the betas of an Adam.
        momentum = {"cycle_momentum": False}
        params = schedule.params.model_copy(update=momentum)
        schedule = schedule.model_copy(update={"params": params})
    stepped = make_schedule(schedule, optimizer)
    values = []
    for step in steps:
        set_schedule(stepped, step - 1)
        values.append(float(optimizer.param_groups[0]["lr"]))
    return values
