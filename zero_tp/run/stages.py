"""Put the settings of a run's stages into its engine, and the batch of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero_tp.run.callback import TrainState

if TYPE_CHECKING:
    from zero_tp.run.config.stages import RunStage


class StageChanges:
    """Changes the engine where a stage begins, and where the batch grows."""

    def __init__(self, state: TrainState) -> None:
        config = state.config
        # The engine of a run without stages was built with all that its only stage has.
        self._stage = None if config.zero_tp.training.stages else 0
        self._accumulation = config.accumulation

    def before_step(self, state: TrainState) -> None:
        """Prepare the engine for `state.step`, on all ranks."""
        samples = state.config.timeline.step_samples(state.step)
        stage = state.config.stages[samples.stage]
        accumulation = stage.accumulation(samples.samples)
        if samples.stage != self._stage:
            self._begin(state, samples.stage, accumulation)
        elif accumulation != self._accumulation:
            assert stage.batch.micro is not None
            state.engine.set_batch(stage.batch.micro, accumulation)
        self._stage = samples.stage
        self._accumulation = accumulation

    def _begin(self, state: TrainState, index: int, accumulation: int) -> None:
        config = state.config
        stage = config.stages[index]
        zero = state.engine.zero
        begins = config.timeline.first_steps[stage.schedule_stage] == state.step
        start = None if begins else zero.schedule_start
        schedule = stage.schedule
        if schedule is None:
            schedule, start = config.settings.scheduler, 0
        assert stage.batch.micro is not None
        state.engine.begin_stage(
            micro_batch=stage.batch.micro,
            accumulation=accumulation,
            recompute=stage.recompute,
            schedule=schedule,
            lr_scale=stage.lr_scale,
            schedule_start=start,
            config=config.stage_config(index).hf_config() if stage.rope else None,
        )
        state.print(describe_stage(stage, state.step, config.timeline.stage_steps(index)[-1]))


def describe_stage(stage: RunStage, step: int, last: int) -> str:
    """Return a line on a stage whose steps `step` to `last` follow."""
    rate = "" if stage.lr_scale == 1 else f", lr × {stage.lr_scale:g}"
    schedule = "" if stage.schedule is None else f", schedule {stage.schedule.type}"
    rope = "".join(f", {name} {value}" for name, value in stage.rope.items())
    return (
        f"stage {stage.name}: steps {step} to {last}, {stage.batch.total} × {stage.length} tokens "
        f"a step, {', '.join(stage.data)}{schedule}{rate}{rope}"
    )
