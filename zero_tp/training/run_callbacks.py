"""The callbacks of every run, in the order in which the loop calls them."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence

from zero_tp.errors import UserError
from zero_tp.process.watch import Watchdog
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.checkpointing import CheckpointCallback
from zero_tp.training.guards import check_replicas
from zero_tp.training.lines import format_figure
from zero_tp.training.metrics import perplexity
from zero_tp.training.metrics_file import MetricsFile
from zero_tp.training.step_logger import StepLogger

COLLECTION_INTERVAL = 50
SKIPS_IN_A_ROW = 10


def run_callbacks(state: TrainState, others: Sequence[Callback] = ()) -> list[Callback]:
    """Return the run's callbacks with `others` after its log and validation, before its guards and checkpoints."""
    watchdog = [] if state.watch is None else [WatchdogCallback(state.watch)]
    log = [StepLogger(), MetricsFile(), Validation()]
    return [*watchdog, *log, *others, SkippedSteps(), GarbageCollection(), ReplicaGuard(), CheckpointCallback()]


class Validation(Callback):
    """Log the loss [nats] and the objective's other figures over `evaluation.batches` of the validation corpora."""

    def on_evaluate(self, state: TrainState) -> None:
        samples, config, topology = state.inputs.validation, state.config, state.topology
        if samples is None:
            return
        limit = config.zero_tp.evaluation.batches * config.global_batch
        batches = samples.batches(limit, config.micro_batch, topology.data_rank, topology.data)
        self.log(state, state.engine.evaluate([batch.to(state.engine.device) for batch in batches]))

    def log(self, state: TrainState, figures: Mapping[str, float]) -> None:
        """Print and log the figures; a loss without other figures gets its perplexity."""
        values = dict(figures) if len(figures) > 1 else {**figures, "perplexity": perplexity(figures["loss"])}
        shown = (f"{name.replace('_', ' ')} {format_figure(name, value)}" for name, value in values.items())
        state.print(f"validation at step {state.step}: {', '.join(shown)}")
        state.log({"step": state.step, **{f"validation_{name}": value for name, value in values.items()}})


class WatchdogCallback(Callback):
    """Enter each phase in the rank's `Watchdog`, which ends the rank when a phase hangs."""

    def __init__(self, watch: Watchdog) -> None:
        self.watch = watch

    def on_start(self, state: TrainState) -> None:
        state.engine.mark = self.watch.mark

    def on_step_begin(self, state: TrainState) -> None:
        self.watch.enter("step", state.step)

    def on_evaluate(self, state: TrainState) -> None:
        self.watch.enter("evaluation", state.step)

    def on_save(self, state: TrainState) -> None:
        self.watch.enter("save", state.step)


class GarbageCollection(Callback):
    """Collect garbage after the first step and at each multiple of 50 steps, on all ranks together.

    Automatic collection would run in the middle of a step, on each rank at another one, while the others wait. Objects
    that are left after the first step are frozen: later collections of a one-layer model take 0.2 ms instead of 0.2 s.
    """

    def __init__(self) -> None:
        self._frozen = self._was_enabled = False

    def on_start(self, state: TrainState) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def on_step_end(self, state: TrainState) -> None:
        if not self._frozen or state.is_due(COLLECTION_INTERVAL):
            gc.collect()
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    def on_end(self, state: TrainState) -> None:
        if self._frozen:
            gc.unfreeze()
        if self._was_enabled:
            gc.enable()


class SkippedSteps(Callback):
    """Report each skipped step; fail the run after 10 in a row, or at the first with `on_nonfinite` "stop".

    In fp16 an overflow of the gradients with a finite loss only lowers the loss scale and does not count.
    """

    def on_step_end(self, state: TrainState) -> None:
        engine, step = state.engine, state.step
        if not engine.skipped:
            state.skipped_in_a_row = 0
            return
        loss, scale = engine.loss, engine.zero.loss_scale
        if scale is not None and scale.reduced and math.isfinite(loss):
            state.print(f"step {step} was skipped: its gradients overflow; the loss scale is {scale.value:g}")
            return
        state.skipped_in_a_row += 1
        if state.config.zero_tp.training.on_nonfinite == "stop":
            reason = 'zero_tp.training.on_nonfinite is "stop"'
        elif state.skipped_in_a_row > SKIPS_IN_A_ROW:
            reason = f"{state.skipped_in_a_row} steps in a row were"
        else:
            state.print(f"step {step} was skipped: its loss or gradients are not finite")
            return
        state.failure = UserError(
            f"step {step}: loss {loss}, gradients not finite ({reason}); progress since the last checkpoint is lost: "
            "lower optimizer.params.lr, or look at the data of this step"
        )


class ReplicaGuard(Callback):
    """Compare the replicated parameters every `guard_interval` steps (see `check_replicas`)."""

    def on_step_end(self, state: TrainState) -> None:
        if state.is_due(state.config.zero_tp.training.guard_interval):
            check_replicas(state.engine.model, state.topology, state.step)
