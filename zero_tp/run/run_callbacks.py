"""The callbacks of every run, in the order in which the loop calls them."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.data.validation_samples import FixedSamples
from zero_tp.engine.guards import check_replicas
from zero_tp.model.moe import Router
from zero_tp.parallel.collectives import all_reduce
from zero_tp.run.callback import Callback, TrainState
from zero_tp.run.checkpoint.directory import step_directory
from zero_tp.run.checkpoint.save import run_saver
from zero_tp.run.metrics import perplexity
from zero_tp.run.metrics_file import MetricsFile
from zero_tp.run.process.watch import Watchdog
from zero_tp.run.step_logger import StepLogger, format_figure
from zero_tp.run.update_norms import UpdateNorms

COLLECTION_INTERVAL = 50
SKIPS_IN_A_ROW = 10


def run_callbacks(
    state: TrainState, watch: Watchdog, others: Sequence[Callback] = ()
) -> list[Callback]:
    """Return the run's callbacks, in the order in which the loop calls them.

    `others` come after its log and validation, and before its guards and checkpoints.
    """
    # The watchdog is first, because the hooks of the others may hang. Logs come before guards, so a
    # step that ends the run is in the log.
    first: list[Callback] = [WatchdogCallback(watch), StepLogger(), MetricsFile(), Validation()]
    if state.config.zero_tp.logging.experts:
        first.append(ExpertShares())
    if state.config.zero_tp.logging.update_norms:
        first.append(UpdateNorms())
    return [
        *first,
        *others,
        SkippedSteps(),
        GarbageCollection(),
        ReplicaGuard(),
        CheckpointCallback(),
    ]


class Validation(Callback):
    """Log the loss [nats] and the objective's other figures of validation.

    They are taken over `evaluation.batches` of the validation corpora.

    Several corpora count by their weights in `data.validation`, whatever their sizes. With
    `training.ema.evaluate` the figures of the averaged weights follow, as `ema/…`.
    """

    def on_evaluate(self, state: TrainState) -> None:
        if state.inputs.validation is None:
            return
        self.log(state, self._figures(state, state.inputs.validation))
        if state.evaluates_average:
            with state.averaged_weights() as prefix:
                figures = self._figures(state, state.inputs.validation)
            self.log(state, figures, prefix)

    def _figures(self, state: TrainState, samples: FixedSamples[Any]) -> dict[str, float]:
        config = state.config
        topology = state.topology
        limit = config.zero_tp.evaluation.batches * config.global_batch
        figures: dict[str, float] = {}
        # Corpus by corpus: the figure is a weighted mean of means, so a large corpus does not count
        # more than its weight.
        for corpus, (share, windows) in enumerate(samples.shares(limit)):
            batches = samples.batches(
                windows, config.micro_batch, topology.data_rank, topology.data, corpus
            )
            means = state.engine.evaluate([batch.to(state.engine.device) for batch in batches])
            figures = {name: figures.get(name, 0.0) + share * mean for name, mean in means.items()}
        return figures

    def log(self, state: TrainState, figures: Mapping[str, float], prefix: str = "") -> None:
        """Print and log the figures; a loss without other figures gets its perplexity.

        Args:
            prefix: of their names.
        """
        values = (
            dict(figures)
            if len(figures) > 1
            else {**figures, "perplexity": perplexity(figures["loss"])}
        )
        shown = (
            f"{name.replace('_', ' ')} {format_figure(name, value)}"
            for name, value in values.items()
        )
        state.print(f"{prefix}validation at step {state.step}: {', '.join(shown)}")
        named = {f"{prefix}validation_{name}": value for name, value in values.items()}
        state.log({"step": state.step, **named})


class ExpertShares(Callback):
    """Log the share of tokens that chose each expert, of every layer in each logged step.

    It counts in forwards of DeepSpeed's engine, not in recomputation. One all-reduce of the counts
    over DP.
    """

    def on_start(self, state: TrainState) -> None:
        model = state.engine.model
        engine = state.engine.deepspeed_engine
        experts = model.spec.experts
        assert experts is not None
        self._layers = model.spec.expert_layers
        self._counting = False
        self._tokens = 0
        shape = (len(self._layers), experts.count)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=state.engine.device)
        self._logs = False
        # Recomputation runs routers again in backward, outside a forward of the engine: `_counting`
        # is off then.
        engine.register_forward_pre_hook(lambda *_: setattr(self, "_counting", self._logs))
        engine.register_forward_hook(lambda *_: setattr(self, "_counting", False))
        routers = [module for module in model.modules() if isinstance(module, Router)]
        for row, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, row))

    def on_step_begin(self, state: TrainState) -> None:
        self._logs = (
            state.is_due(state.config.zero_tp.logging.measured_interval) or state.is_last_step
        )

    def on_step_end(self, state: TrainState) -> None:
        if not self._logs:
            return
        shares = all_reduce(self._counts, state.topology.data_group) / (
            self._tokens * state.topology.data
        )
        rows = zip(self._layers, shares.tolist(), strict=True)
        figures = {
            f"experts/layer_{n}/{e}": share for n, row in rows for e, share in enumerate(row)
        }
        state.log({"step": state.step, **figures})
        self._counts.zero_()
        self._logs = False
        self._tokens = 0

    def _count(self, row: int, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        if self._counting:
            chosen = output[1].flatten()
            self._counts[row].scatter_add_(0, chosen, torch.ones_like(chosen))
            # Every layer sees the same tokens: count them once.
            self._tokens += len(output[1]) * (row == 0)


class WatchdogCallback(Callback):
    """Enter each phase in the rank's `Watchdog`, which ends the rank when a phase hangs."""

    def __init__(self, watch: Watchdog) -> None:
        self.watch = watch

    def on_start(self, state: TrainState) -> None:
        state.engine.on_phase = self.watch.mark

    def on_step_begin(self, state: TrainState) -> None:
        self.watch.enter("step", state.step)

    def on_evaluate(self, state: TrainState) -> None:
        self.watch.enter("evaluation", state.step)

    def on_save(self, state: TrainState) -> None:
        self.watch.enter("save", state.step)


class GarbageCollection(Callback):
    """Collect garbage after the first step and at each multiple of 50 steps, on all ranks together.

    Automatic collection would interrupt each rank in a different step, and the others would wait
    for it. Objects that are left after the first step are frozen: later collections of a one-layer
    model take 0.2 ms instead of 0.2 s.
    """

    def on_start(self, state: TrainState) -> None:
        self._frozen = False
        self._was_enabled = gc.isenabled()
        # The collector runs when a count of allocations is reached, which differs between ranks.
        gc.disable()

    def on_step_end(self, state: TrainState) -> None:
        if not self._frozen or state.is_due(COLLECTION_INTERVAL):
            gc.collect()
        if not self._frozen:
            # After the first step, because only then do DeepSpeed's and torch's lasting objects
            # exist.
            gc.freeze()
            self._frozen = True

    def on_end(self, state: TrainState) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()


class SkippedSteps(Callback):
    """Report each skipped step.

    The run fails after 10 in a row, or at the first with `on_nonfinite` "stop".

    In fp16 an overflow of the gradients with a finite loss only lowers the loss scale and does not
    count.
    """

    def on_step_end(self, state: TrainState) -> None:
        engine = state.engine
        step = state.step
        if not engine.skipped:
            state.skipped_in_a_row = 0
            return
        loss = engine.loss
        scale = engine.zero.loss_scale
        if scale is not None and scale.reduced and math.isfinite(loss):
            state.print(
                f"step {step} was skipped: its gradients overflow; the loss scale is "
                f"{scale.value:g}"
            )
            return
        state.skipped_in_a_row += 1
        if state.config.zero_tp.training.on_nonfinite == "stop":
            reason = 'zero_tp.training.on_nonfinite is "stop"'
        elif state.skipped_in_a_row > SKIPS_IN_A_ROW:
            reason = f"{state.skipped_in_a_row} steps in a row were skipped"
        else:
            state.print(f"step {step} was skipped: its loss or gradients are not finite")
            return
        # Not raised here: the callbacks after this one must still see the step, such as a save in
        # the background.
        state.failure = UserError(
            f"step {step}: loss {loss}, gradients not finite ({reason}); progress since the last "
            "checkpoint is lost: "
            "lower optimizer.params.lr, or look at the data of this step"
        )


class ReplicaGuard(Callback):
    """Compare the replicated parameters every `guard_interval` steps (see `check_replicas`)."""

    def on_step_end(self, state: TrainState) -> None:
        if state.is_due(state.config.zero_tp.training.guard_interval):
            check_replicas(state.engine.model, state.topology, state.step)


class CheckpointCallback(Callback):
    """Save a checkpoint whenever one is due.

    A failed save is logged and training continues, because earlier checkpoints stay valid.

    Raises:
        UserError: the final checkpoint could not be written, or another launch has taken the run
            directory over.
    """

    def on_start(self, state: TrainState) -> None:
        inputs = state.inputs
        self.saver = run_saver(
            state.engine.zero,
            state.config,
            state.directory,
            tokenizer=inputs.recorded_tokenizer,
            fingerprint=inputs.fingerprint,
            corpora=inputs.corpora,
            validation=inputs.validation_corpora,
            parent=state.parent,
            check_owner=state.check_owner,
        )

    def on_step_end(self, state: TrainState) -> None:
        if state.failure is not None:
            self.saver.wait()  # a save in the background still gets its name
        self._report_finished_save(state)

    def on_save(self, state: TrainState) -> None:
        # An earlier save first: its outcome must be reported before the next one replaces it.
        self.saver.wait()
        self._report_finished_save(state)
        self.saver.save(state.step)
        if state.is_last_step:
            self.saver.wait()
        self._report_finished_save(state, final=state.is_last_step)

    def _report_finished_save(self, state: TrainState, *, final: bool = False) -> None:
        outcome = self.saver.outcome()
        if outcome is None:
            return
        step, problem = outcome
        notes = self.saver.notes
        self.saver.notes = []
        for note in notes:
            state.print(note)
        if not problem:
            removed = ", ".join(f"step {step}" for step in self.saver.removed)
            reason = f" (checkpoint.keep is {state.config.zero_tp.checkpoint.keep})"
            saved = f"saved {step_directory(state.directory, step)}"
            state.print(saved + (f"; removed {removed}{reason}" if removed else ""))
            return
        message = f"step {step} was not saved: {problem}; the checkpoints before it are intact"
        if final:
            raise UserError(f"{message}: make room, and start the same command again to resume")
        state.print(f"{message}, training continues")
