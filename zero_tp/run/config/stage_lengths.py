"""Make the timeline of a run from the lengths of its stages, and check that they add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zero_tp.base.constants import RAMP_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.base.settings.timeline import Timeline
from zero_tp.base.validation import ErrorCollector
from zero_tp.run.config.stages import RunStage, stage_key

MOST_INCREMENTS = 100_000
"""Of a ramp: each is a segment of the timeline."""


def make_timeline(zero_tp: ZeroTP, stages: Sequence[RunStage]) -> Timeline:
    """Return the steps of a run, whose global batch is known.

    Raises:
        ConfigError: the lengths of the stages do not add up, or a ramp does not fit.
    """
    _check_ramps_of_stages(zero_tp, stages)
    training = zero_tp.training
    written = training.stages
    if not written:
        size = replace(stages[0].size, steps=training.steps, tokens=training.tokens)
        timeline = Timeline([size])
    else:
        _check_ends(zero_tp)
        timeline = Timeline(
            [
                replace(
                    stage.size,
                    **{name: getattr(lengths, name) for name in ("steps", "tokens", "until")},
                    continues=index > 0
                    and (stage.data, stage.length)
                    == (stages[index - 1].data, stages[index - 1].length),
                )
                for index, (stage, lengths) in enumerate(zip(stages, written, strict=True))
            ],
            training.steps,
            training.tokens,
        )
        _check_sums(zero_tp, timeline)
    collector = ErrorCollector()
    for index, stage in enumerate(stages):
        collector.errors += _wrong_ramps(index, stage, timeline)
    collector.raise_all()
    return timeline


def _check_ramps_of_stages(zero_tp: ZeroTP, stages: Sequence[RunStage]) -> None:
    """Check what could not be seen afterwards: two ramps at once, and too many batches."""
    written = zero_tp.training.stages
    own = [index for index, one in enumerate(written) if one.batch_size_rampup is not None]
    if own and zero_tp.training.batch_size_rampup is not None:
        problem = f"given with {stage_key(own[0], 'batch_size_rampup')}"
        raise ConfigError(RAMP_KEY, problem, "give the run one, or its stages")
    for index, stage in enumerate(stages):
        assert stage.batch.total is not None
        if stage.ramp is None or stage.batch.total < stage.ramp.increment * MOST_INCREMENTS:
            continue
        key = stage_key(index, "batch_size_rampup") if stage.own_ramp else RAMP_KEY
        problem = f"{stage.ramp.increment} samples to a batch of {stage.batch.total}"
        raise ConfigError(f"{key}.increment", problem, "use a larger one")


def _check_ends(zero_tp: ZeroTP) -> None:
    """Check that shares of the run rise, up to 1.0 for the last stage."""
    training = zero_tp.training
    shares = [
        (i, stage.until) for i, stage in enumerate(training.stages) if stage.until is not None
    ]
    if not shares:
        return
    first = stage_key(shares[0][0], "until")
    if (training.steps, training.tokens) == (None, None):
        problem = "a share of a length that is not given"
        raise ConfigError(first, problem, "give zero_tp.training.tokens or zero_tp.training.steps")
    before = 0.0
    for index, until in shares:
        assert until is not None
        if until <= before:
            problem = f"{until:g} is not above the {before:g} before it"
            raise ConfigError(stage_key(index, "until"), problem, "let the shares rise")
        before = until
    last = len(training.stages) - 1
    if training.stages[last].until != 1:
        key = stage_key(last, "until")
        raise ConfigError(key, "is not 1.0: the last stage ends with the run", "set it to 1.0")


def _check_sums(zero_tp: ZeroTP, timeline: Timeline) -> None:
    """Check that each stage has a step, and that they add up to the length of the run."""
    training = zero_tp.training
    for index in range(len(training.stages)):
        if not timeline.stage_steps(index):
            problem = "has no step: the stages before it reach its end"
            raise ConfigError(stage_key(index), problem, "let it end later, or leave it out")
    if training.steps is not None and timeline.steps != training.steps:
        problem = f"{training.steps}, but its stages have {timeline.steps} steps"
        raise ConfigError("zero_tp.training.steps", problem, "leave it out, or make them equal")
    # The last of stages with shares ends with the run.
    if training.tokens is None or any(stage.until is not None for stage in training.stages):
        return
    tokens = sum(
        stage.tokens or timeline.stage_tokens(index) for index, stage in enumerate(training.stages)
    )
    if training.tokens != tokens:
        problem = f"{training.tokens}, but its stages have {tokens} tokens"
        raise ConfigError("zero_tp.training.tokens", problem, "leave it out, or make them equal")


def _wrong_ramps(index: int, stage: RunStage, timeline: Timeline) -> Iterator[ConfigError]:
    """Yield what is wrong with a ramp that the stage sees: its batches are whole micro-batches."""
    ramp = stage.ramp
    total = stage.batch.total
    if ramp is None or total is None:
        return
    start = timeline.step_samples(timeline.first_steps[index]).tokens_before
    if not stage.own_ramp and start >= ramp.tokens:
        return
    key = stage_key(index, "batch_size_rampup") if stage.own_ramp else RAMP_KEY
    if ramp.start >= total:
        problem = f"{ramp.start} samples, but the full batch has {total}"
        yield ConfigError(f"{key}.start", problem, "start with fewer")
        return
    if (total - ramp.start) % ramp.increment:
        problem = f"{ramp.start} + n × {ramp.increment} is never the full batch of {total} samples"
        yield ConfigError(f"{key}.increment", problem, f"use a divisor of {total - ramp.start}")
    if stage.batch.micro is None or stage.batch.data_parallel is None:
        return
    unit = stage.batch.micro * stage.batch.data_parallel
    for name in ("start", "increment"):
        if (value := getattr(ramp, name)) % unit:
            parts = f"micro {stage.batch.micro} × data {stage.batch.data_parallel}"
            problem = f"{value} samples ≠ n × {parts}"
            yield ConfigError(f"{key}.{name}", problem, f"use a multiple of {unit}")
