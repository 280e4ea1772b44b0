"""Resolve the stages of a run: what each trains on, and the schedule of its rate.

A run without `zero_tp.training.stages` has one stage, which is the whole run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from zero_tp.base.constants import STAGES_KEY
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.resolve import BatchSizes, fill_schedule, resolve_batch, suggest_auto
from zero_tp.base.settings.schedule import Schedule, check_scheduler
from zero_tp.base.settings.schema import BatchRampUp, TrainingStage, ZeroTP
from zero_tp.base.settings.timeline import StageSize, Timeline
from zero_tp.base.validation import ErrorCollector, with_keys

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MICRO_KEY = "train_micro_batch_size_per_gpu"
OF_EVERY_ROPE = ("rope_theta", "partial_rotary_factor")


def stage_key(index: int, name: str = "") -> str:
    """Return the key of a stage, or of one of its fields, for errors."""
    return f"{STAGES_KEY}[{index}]" + (f".{name}" if name else "")


def name_in_stage(index: int, key: str) -> str:
    """Return the key of a stage for a key that is wrong with the stage's settings."""
    if key.startswith(STAGES_KEY):
        return key
    name = key.rpartition(".")[2] if key.startswith("zero_tp.data") else key
    if key.startswith("zero_tp.recompute"):
        name = key.removeprefix("zero_tp.")
    return stage_key(index, name)


def name_stages(error: ConfigError) -> ConfigError:
    """Return an error whose keys count stages in brackets: `stages[1].tokens`."""
    key = re.escape(STAGES_KEY)
    return with_keys(error, lambda name: re.sub(rf"^{key}\.(\d+)", rf"{STAGES_KEY}[\1]", name))


@dataclass(frozen=True)
class RunStage:
    """A stage of a run, with what it does not name taken from the stage before.

    Attributes:
        name: empty if the run has no stages.
        batch: of its full batch.
        ramp: how its batch grows. own_ramp: it counts the stage's tokens, not the run's.
        rope: fields of the model's `rope_parameters` that differ from the file's.
        schedule: of the rate; None: that of the file.
        schedule_stage: index of the stage with whose first step the schedule begins.
        lr_scale: factor of the file's rate.
    """

    name: str
    batch: BatchSizes
    data: dict[str, float]
    length: int
    recompute: RecomputePolicy
    ramp: BatchRampUp | None = None
    own_ramp: bool = False
    rope: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule | None = None
    schedule_stage: int = 0
    lr_scale: float = 1.0

    @classmethod
    def whole_run(cls, zero_tp: ZeroTP, batch: BatchSizes) -> RunStage:
        """Return the stage of a run without stages."""
        data = zero_tp.data
        ramp = zero_tp.training.batch_size_rampup
        policy = zero_tp.recompute_policy
        return cls("", batch, dict(data.train), data.sequence_length, policy, ramp)

    def follow(self, index: int, written: TrainingStage) -> RunStage:
        """Return the stage after this one, which has number `index`."""
        ramp = written.batch_size_rampup
        recompute = written.recompute
        changes: dict[str, Any] = {
            "name": written.name,
            "data": None if written.data is None else dict(written.data),
            "length": written.sequence_length,
            "recompute": (
                RecomputePolicy(mode=recompute) if isinstance(recompute, str) else recompute
            ),
            "lr_scale": written.lr_scale,
            "rope": merge_rope(self.rope, {} if written.rope is None else written.rope),
            "schedule_stage": None if written.scheduler is None else index,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        # A ramp of the run goes on; that of an earlier stage has counted that stage's tokens.
        changes |= {"ramp": None if self.own_ramp else self.ramp, "own_ramp": False}
        if ramp is not None:
            changes |= {"ramp": ramp, "own_ramp": True}
        following = replace(self, **changes)
        return replace(following, batch=_batch(self.batch, following.length, written))

    @property
    def size(self) -> StageSize:
        """Return the size of its steps, without its length."""
        assert self.batch.total is not None
        return StageSize(self.batch.total, self.length, ramp=self.ramp, own_ramp=self.own_ramp)

    def accumulation(self, samples: int) -> int:
        """Return the forwards of a step of `samples` samples on one replica."""
        assert self.batch.micro is not None and self.batch.data_parallel is not None
        return samples // (self.batch.micro * self.batch.data_parallel)


def _batch(before: BatchSizes, length: int, written: TrainingStage) -> BatchSizes:
    """Return the batch sizes of a stage of samples of `length` tokens."""
    total = written.train_batch_size or before.total
    if written.batch_tokens is not None:
        total, rest = divmod(written.batch_tokens, length)
        if rest or not total:
            problem = f"{written.batch_tokens} tokens ≠ samples of {length} tokens"
            raise ConfigError("batch_tokens", problem, f"use a multiple of {length}")
    micro = getattr(written, MICRO_KEY) or before.micro
    try:
        sizes = {"train_batch_size": total, MICRO_KEY: micro}
        return resolve_batch(sizes, before.data_parallel)
    except ConfigError as error:
        keys = ("batch_tokens", "train_batch_size", MICRO_KEY)
        key = next((one for one in keys if getattr(written, one) is not None), keys[1])
        raise ConfigError(key, error.problem, error.remedy) from None


def merge_rope(before: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` with changed fields, which may be nested by type of layer.

    Another `rope_type` has other fields: those of the one before go.
    """
    merged = dict(before)
    if changes.get("rope_type") not in (None, before.get("rope_type", "default")):
        merged = {name: before[name] for name in OF_EVERY_ROPE if name in before}
    for name, value in changes.items():
        old = merged.get(name)
        if isinstance(value, dict) and isinstance(old, dict):
            merged[name] = merge_rope(old, value)
        else:
            merged[name] = value
    return merged


def fixed_stages(
    stages: Sequence[RunStage], timeline: Timeline, names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return what no resume may change of each stage that has been trained, by its key.

    Args:
        names: of corpora that have moved: the prefix now → the one before.
    """
    return {
        stage_key(index): {
            "name": stage.name,
            "first_step": timeline.first_steps[index],
            "steps": len(timeline.stage_steps(index)),
            "data": [[names.get(prefix, prefix), share] for prefix, share in stage.data.items()],
            "sequence_length": stage.length,
            "train_batch_size": stage.batch.total,
            "batch_size_rampup": (
                stage.ramp.model_dump() if stage.ramp is not None and stage.own_ramp else None
            ),
            "rope": stage.rope,
            "scheduler": None if stage.schedule is None else stage.schedule.written(),
            "lr_scale": stage.lr_scale,
        }
        for index, stage in enumerate(stages)
        if stage.name
    }


def resolve_stages(zero_tp: ZeroTP, batch: BatchSizes) -> tuple[RunStage, ...]:
    """Return the stages of a run, at least one, without their schedules.

    Raises:
        ConfigErrors: all batches that do not fit, with their stages' keys.
    """
    whole = RunStage.whole_run(zero_tp, batch)
    written = zero_tp.training.stages
    if not written:
        return (whole,)
    if batch.total is None:
        problem = "need the global batch, which the number of ranks decides"
        raise ConfigError(STAGES_KEY, problem, "give --world-size N, or train_batch_size")
    collector = ErrorCollector()
    names = [stage.name for stage in written]
    stages: list[RunStage] = []
    previous = whole
    for index, stage in enumerate(written):
        with collector:
            if names.index(stage.name) != index:
                problem = f'"{stage.name}" is the name of {stage_key(names.index(stage.name))}, too'
                raise ConfigError(stage_key(index, "name"), problem, "give each its own")
        try:
            previous = previous.follow(index, stage)
        except ConfigError as error:
            # The later stages keep the sizes before it, so that each error is told once.
            collector.errors.append(
                ConfigError(stage_key(index, error.key), error.problem, error.remedy)
            )
        stages.append(previous)
    collector.raise_all()
    return tuple(stages)


def check_schedules(zero_tp: ZeroTP, stages: Sequence[RunStage], of_file: Schedule | None) -> None:
    """Check that a stage's schedule can replace the one before.

    Args:
        of_file: the file's own schedule.

    Raises:
        ConfigError: a schedule is never used, or would leave its betas to the next.
    """
    brought = [i for i, one in enumerate(zero_tp.training.stages) if one.scheduler is not None]
    if not brought:
        return
    if brought[0] == 0 and of_file is not None:
        problem = "replaces the file's scheduler from the first step on"
        raise ConfigError(stage_key(0, "scheduler"), problem, "leave one of them out")
    schedules = {stage_key(i, "scheduler"): stages[i].schedule for i in brought}
    for key, schedule in {"scheduler": of_file, **schedules}.items():
        if schedule is not None and getattr(schedule.params, "cycle_momentum", False):
            problem = "sets the optimizer's betas, which the next schedule would keep"
            raise ConfigError(f"{key}.params.cycle_momentum", problem, "set it to false")


def file_schedule_steps(zero_tp: ZeroTP, timeline: Timeline) -> range:
    """Return the steps that the file's own schedule rules: up to the first stage with another."""
    others = (i for i, one in enumerate(zero_tp.training.stages) if one.scheduler is not None)
    first = next(others, -1)
    # The first stage's schedule replaces the file's; its "auto" then has no meaning.
    return range(1, timeline.first_steps[first if first > 0 else -1])


def schedule_stages(
    zero_tp: ZeroTP, stages: tuple[RunStage, ...], timeline: Timeline, rate: Any
) -> tuple[RunStage, ...]:
    """Return the stages with their schedules, of which "auto" and tokens are filled in.

    Args:
        rate: `optimizer.params.lr`.

    Raises:
        ConfigErrors: all wrong keys of the stages' `scheduler` blocks.
    """
    collector = ErrorCollector()
    schedules: dict[int, Schedule] = {}
    for index, written in enumerate(zero_tp.training.stages):
        if written.scheduler is None:
            continue
        try:
            # Its own stage's: "auto" must stay when a later stage is appended.
            steps = timeline.stage_steps(index)
            block = fill_schedule(written.scheduler, timeline, steps, rate)
            schedules[index] = check_scheduler({"scheduler": block})
        except ConfigError as error:
            for one in error.errors:
                assert isinstance(one, ConfigError)
                one = suggest_auto(one)
                collector.errors.append(
                    ConfigError(stage_key(index, one.key), one.problem, one.remedy)
                )
    collector.raise_all()
    return tuple(replace(stage, schedule=schedules.get(stage.schedule_stage)) for stage in stages)


def with_stage_lengths(zero_tp: ZeroTP, stages: Sequence[RunStage], timeline: Timeline) -> ZeroTP:
    """Return the block with all lengths in steps, and the stages' schedules filled in."""
    training = zero_tp.training
    written = []
    for index, (stage, one) in enumerate(zip(stages, training.stages, strict=False)):
        own = None if one.scheduler is None else stage.schedule
        lengths = {"steps": len(timeline.stage_steps(index)), "tokens": None, "until": None}
        schedule = {"scheduler": None if own is None else own.written()}
        written.append(one.model_copy(update=lengths | schedule))
    update = {"steps": timeline.steps, "tokens": None, "stages": written}
    return zero_tp.model_copy(update={"training": training.model_copy(update=update)})


def stage_model(config: PreTrainedConfig, rope: dict[str, Any], index: int) -> PreTrainedConfig:
    """Return the model's config with a stage's `rope_parameters`.

    Raises:
        ConfigError: the model does not rotate, or a field is wrong.
    """
    import copy

    from zero_tp.model.architectures import architecture_of
    from zero_tp.model.architectures.rotary import check_rope_values

    if not rope:
        return config
    changed = copy.deepcopy(config)
    key = stage_key(index, "rope")
    before: dict[str, Any] | None = getattr(config, "rope_parameters", None)
    if not before:
        raise ConfigError(key, f"a {config.model_type} does not rotate", "leave it out")
    changed.rope_parameters = merge_rope(before, rope)
    try:
        check_rope_values(changed.rope_parameters)
        architecture_of(changed).spec(changed)
    except ConfigError as error:
        raise with_keys(error, lambda name: re.sub(r"^[\w.]*rope_parameters", key, name)) from None
    except UserError as error:
        raise ConfigError(key, str(error), "use other values") from None
    return changed
