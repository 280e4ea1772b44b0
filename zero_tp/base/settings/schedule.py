"""Type the `scheduler` block: DeepSpeed's five schedules and transformers' schedules that need no
metric.

Each class has the arguments of one schedule; a test compares them with the signatures. The k-th
step of a run (k = 1, 2, …) trains at the schedule's value at k. `num_stable_steps` is omitted,
because the other two phases determine it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny

from zero_tp.base.errors import ConfigError, did_you_mean, shown
from zero_tp.base.validation import Below1, ConfigModel, Count, NonNegative, Positive, validate

Ratio = Annotated[float, Field(ge=0, le=1)]
Phase = Literal["linear", "cosine", "1-sqrt"]


class SchedulerBlock(ConfigModel):
    """The block as written."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class LRRangeTest(ConfigModel):
    lr_range_test_min_lr: NonNegative = 1e-3
    lr_range_test_step_size: Positive = 2000
    lr_range_test_step_rate: NonNegative = 1.0
    lr_range_test_staircase: bool = False


class OneCycle(ConfigModel):
    cycle_min_lr: NonNegative
    cycle_max_lr: NonNegative
    decay_lr_rate: NonNegative = 0.0
    cycle_first_step_size: Positive = 2000
    cycle_second_step_size: Positive | None = None
    cycle_first_stair_count: Count = 0
    cycle_second_stair_count: Count | None = None
    decay_step_size: Count = 0
    cycle_momentum: bool = True
    cycle_min_mom: Below1 = 0.8
    cycle_max_mom: Below1 = 0.9
    decay_mom_rate: NonNegative = 0.0


class WarmupLR(ConfigModel):
    """Without `warmup_max_lr`, DeepSpeed ends the warm-up at the optimizer's rate; only here."""

    warmup_min_lr: NonNegative = 0.0
    warmup_max_lr: NonNegative | None = None
    warmup_num_steps: Positive = 1000
    warmup_type: Literal["log", "linear"] = "log"


class WarmupDecayLR(WarmupLR):
    """`warmup_max_lr` must be written: DeepSpeed's default is 0.001, whatever
    `optimizer.params.lr` is.
    """

    total_num_steps: Positive
    warmup_max_lr: NonNegative


class WarmupCosineLR(ConfigModel):
    total_num_steps: Positive
    warmup_min_ratio: Below1 = 0.0
    warmup_num_steps: Positive = 1000
    cos_min_ratio: Ratio = 0.0001
    warmup_type: Literal["log", "linear"] = "log"


class Constant(ConfigModel):
    pass


class ConstantWithWarmup(ConfigModel):
    num_warmup_steps: Count


class InverseSqrt(ConstantWithWarmup):
    timescale: Positive | None = None


class Linear(ConstantWithWarmup):
    num_training_steps: Positive


class Cosine(Linear):
    num_cycles: Annotated[float, Field(gt=0)] = 0.5


class CosineWithRestarts(Linear):
    num_cycles: Positive = 1


class Polynomial(Linear):
    lr_end: NonNegative = 1e-7
    power: Annotated[float, Field(gt=0)] = 1.0


class CosineWithMinLR(Cosine):
    min_lr: NonNegative | None = None
    min_lr_rate: Ratio | None = None


class CosineWarmupWithMinLR(CosineWithMinLR):
    warmup_lr_rate: Ratio | None = None


class WarmupStableDecay(Linear):
    num_decay_steps: Positive
    warmup_type: Phase = "linear"
    decay_type: Phase = "cosine"
    min_lr_ratio: Ratio = 0.0
    num_cycles: Annotated[float, Field(gt=0)] = 0.5


DEEPSPEED_SCHEDULES: dict[str, type[ConfigModel]] = {
    model.__name__: model
    for model in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
TRANSFORMERS_SCHEDULES: dict[str, type[ConfigModel]] = {
    "constant": Constant,
    "constant_with_warmup": ConstantWithWarmup,
    "inverse_sqrt": InverseSqrt,
    "linear": Linear,
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "cosine_with_min_lr": CosineWithMinLR,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLR,
    "polynomial": Polynomial,
    "warmup_stable_decay": WarmupStableDecay,
}
"""By the names of transformers' `get_scheduler`."""
SCHEDULES = {**DEEPSPEED_SCHEDULES, **TRANSFORMERS_SCHEDULES}

REFUSED_SCHEDULES = dict.fromkeys(
    ("reduce_lr_on_plateau", "greedy"), "it follows a metric, but a run's steps have none"
)
LENGTHS = ("total_num_steps", "num_training_steps")
WARMUPS = ("warmup_num_steps", "num_warmup_steps")
"""DeepSpeed's and transformers' names for the length of the schedule and of its warm-up."""
TOKEN_LENGTHS = {"warmup_tokens": WARMUPS, "decay_tokens": ("num_decay_steps",)}
"""Lengths in tokens → the arguments in steps that they stand for."""


class Schedule(ConfigModel):
    """The block with typed arguments."""

    type: str
    params: SerializeAsAny[ConfigModel]

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments that were given a value."""
        return self.params.model_dump(mode="json", exclude_unset=True)

    def written(self) -> dict[str, Any]:
        """Return the block as a file has it."""
        return {"type": self.type, "params": self.arguments}

    def number(self, name: str) -> float:
        """Return the argument `name`, its default, or 0 if the schedule has none."""
        return getattr(self.params, name, None) or 0


def check_scheduler(values: dict[str, Any]) -> Schedule:
    """Return the `scheduler` block of DeepSpeed's config, typed."""
    block = validate(SchedulerBlock, values["scheduler"], "scheduler")
    name = block.type
    if name in REFUSED_SCHEDULES:
        raise ConfigError(
            "scheduler.type", f"{shown(name)} is refused: {REFUSED_SCHEDULES[name]}", "use another"
        )
    if name not in SCHEDULES:
        raise ConfigError(
            "scheduler.type", f"{shown(name)} is unknown", did_you_mean(name, SCHEDULES)
        )
    for length in TOKEN_LENGTHS.keys() & block.params.keys():
        problem = "a length in tokens, which only a run's file has"
        raise ConfigError(f"scheduler.params.{length}", problem, "give it in steps")
    params = validate(SCHEDULES[name], block.params, "scheduler.params")
    # The function of transformers raises for both and for neither, but only when a rank builds the
    # schedule.
    if isinstance(params, CosineWithMinLR) and (params.min_lr is None) == (
        params.min_lr_rate is None
    ):
        problem = "required, but not given" if params.min_lr is None else "given with min_lr_rate"
        raise ConfigError(
            "scheduler.params.min_lr",
            problem,
            "give min_lr, or its ratio to the rate as min_lr_rate",
        )
    return Schedule(type=name, params=params)
