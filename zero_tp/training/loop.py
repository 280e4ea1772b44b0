"""A run is trained from its start to its last checkpoint, with tools of other packages that it may be given."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext

import torch.distributed as dist

from zero_tp.checkpoint.directory import step_directory
from zero_tp.checkpoint.save import Saver
from zero_tp.devices import device_peak_flops
from zero_tp.errors import UserError
from zero_tp.models.flops import hardware_flops, model_flops
from zero_tp.process.garbage import collected_between_steps
from zero_tp.training.guards import check_replicas
from zero_tp.training.lines import StepRecord
from zero_tp.training.metrics import StepMeter, memory_gib
from zero_tp.training.prepared import Start, ValidationSamples
from zero_tp.training.report import Reporter
from zero_tp.training.tools import Requests

SKIPS_IN_A_ROW = 10


def train(start: Start, requests: Requests) -> None:
    """Train, validate and save until the run's steps are done, from where it was started. Collective.

    Args:
        start: of `zero_tp.training.start.started`, inside its block.
        requests: raised by signals: to save, or to save and stop.

    Raises:
        UserError: the loss is not finite and `on_nonfinite` says stop, 10 steps in a row were skipped, or the last
            checkpoint cannot be written.
    """
    if start.step < start.run.config.zero_tp.training.steps:
        _Loop(start, requests).train()


class _Loop:
    def __init__(self, start: Start, requests: Requests):
        run, tools, engine, done = start.run, start.tools, start.engine, start.step
        self.tasks, self.forecast = tools.tasks, start.forecast
        self.run, self.engine, self.done, self.requests = run, engine, done, requests
        self.config, self.settings = run.config, run.config.zero_tp
        self.topology, self.device = engine.topology, engine.device
        first = self.topology.rank == 0
        self.profiler = tools.profiler(engine) if first and tools.profiler is not None else None
        self.steps = self.settings.training.steps
        spec, length = engine.model.spec, self.settings.data.sequence_length
        self.meter = StepMeter(
            self.config.global_batch * length,
            model_flops(spec, self.config.global_batch, length, self.config.labelled),
            self.topology.world,
            device_peak_flops(self.device.type, engine.dtype, dist.barrier),
            self.steps,
            hardware_flops=hardware_flops(
                spec,
                self.config.global_batch,
                length,
                self.config.labelled,
                self.settings.recompute_policy.run_again(spec.layers, self.config.accumulation),
            ),
        )
        self.reporter = Reporter(
            run.directory,
            first,
            self.steps,
            self.settings.logging.interval,
            start_step=done,
            figures=engine.model.figures,
            monitors=tools.monitors(self.config, run.directory, done) if first and tools.monitors is not None else None,
        )
        self.skips_in_a_row = 0
        self.ahead = run.read_ahead(self.topology, self.steps)
        self.watch = tools.watch
        if self.watch is not None:
            engine.mark = self.watch.mark
        corpora, parent = (run.corpora, run.validation_corpora), start.parent
        self.saver = Saver(engine.zero, self.config, run.directory, run.recorded_tokenizer, *corpora, done, parent)

    def train(self) -> None:
        collecting = collected_between_steps()
        with self.reporter as reporter, self.requests.accepting(), self.ahead, collecting as collect:
            self.meter.start()
            for step in range(self.done + 1, self.steps + 1):
                self._enter("step", step)
                self._step(step)
                last = step == self.steps
                with self.meter.paused():
                    collect(step)
                    self._tell_saved()
                    if _due(step, self.settings.training.guard_interval):
                        check_replicas(self.engine.model, self.topology, step)
                    evaluated = last or _due(step, self.settings.evaluation.interval)
                    if self.run.validation and evaluated:
                        self._enter("evaluation", step)
                        reporter.validation(step, self._validation(self.run.validation))
                    if self.tasks is not None and evaluated:
                        self._enter("evaluation", step)
                        reporter.tasks(step, self.tasks(self.engine, self.config.micro_batch))
                        gc.collect()  # thousands of requests, which refer to each other
                    stop, save = self.requests.agreed(self.device)
                    last |= stop
                    if last or save or _due(step, self.settings.checkpoint.interval):
                        self._save(step, last=last)
                    if stop:
                        reporter.say(
                            f"stopped after step {step}, as a signal asked; the same command goes on from there"
                        )
                        break
            dist.barrier()  # the store goes with the first rank, and others still ask it for word of the last save
            if self.forecast is not None:
                reporter.say(self.forecast.outcome())

    def _enter(self, phase: str, step: int) -> None:
        """Say what this rank does next, and what was seen of the others."""
        if self.watch is not None:
            self.watch.enter(phase, step)
            for note in self.watch.notes():
                self.reporter.say(note)

    def _save(self, step: int, *, last: bool) -> None:
        if self.skips_in_a_row:
            # Its weights may be what makes the loss non-finite; saving it would push good checkpoints out.
            self.reporter.say(f"step {step} is not saved: the last {self.skips_in_a_row} steps were skipped")
            return
        self._enter("save", step)
        self.saver.wait()
        self._tell_saved()  # of the one before
        self.saver.save(step)
        if last:
            self.saver.wait()
        self._tell_saved(last=last)

    def _tell_saved(self, *, last: bool = False) -> None:
        """Say how a save that has ended went. One that fails costs no training: the checkpoints before it stay.

        Raises:
            UserError: it was the run's last.
        """
        ended = self.saver.outcome()
        if ended is None:
            return
        step, problem = ended
        notes, self.saver.notes = self.saver.notes, []
        for note in notes:
            self.reporter.say(note)
        if not problem:
            removed = ", ".join(f"step {step}" for step in self.saver.removed)
            why = f" (checkpoint.keep is {self.settings.checkpoint.keep})"
            saved = f"saved {step_directory(self.run.directory, step)}"
            self.reporter.say(saved + (f"; removed {removed}{why}" if removed else ""))
            return
        told = f"step {step} was not saved: {problem}; the checkpoints before it are intact"
        if last:
            raise UserError(f"{told}: make room, and start the same command again to go on from there")
        self.reporter.say(f"{told}, training goes on")

    def _step(self, step: int) -> None:
        batches = self.ahead.take(step)
        learning_rate = self.engine.learning_rate
        with self.profiler.around(step) if self.profiler is not None else nullcontext():
            self.engine.run_step(
                [batch.to(self.device) for batch in batches],
                guarded=step if _due(step, self.settings.training.guard_interval) else None,
                guard_gradients=self.settings.training.guard_gradients,
            )
        logged = self.reporter.due(step) or self.engine.skipped or bool(self.engine.spike)
        # Who reads it waits for the device: before the clock, and where other work than steps follows.
        loss = self.engine.loss if logged or self._pauses(step) else math.nan
        self.meter.tick()
        if self.profiler is not None and (told := self.profiler.outcome(step)):
            self.reporter.say(told)
        self.reporter.advance(step)
        if logged:
            self.reporter.log(
                StepRecord(
                    step,
                    step * self.config.global_batch,
                    loss,
                    learning_rate,
                    self.engine.gradient_norm,
                    self.meter.read(step),
                    memory_gib(self.device.type),
                    self.engine.loss_scale,
                    self.engine.skipped_steps,
                    self.engine.figures,
                )
            )
        if self.engine.spike:
            self.reporter.say(f"step {step} was skipped as a spike: {self.engine.spike}")
        if self.engine.skipped and self.engine.trace is not None:
            self.reporter.say(f"step {step}: {self.engine.trace.told()}")
        self._judge(step, loss)

    def _pauses(self, step: int) -> bool:
        """Return whether a check, an evaluation or a save is due after the step."""
        settings = self.settings
        intervals = (settings.training.guard_interval, settings.evaluation.interval, settings.checkpoint.interval)
        return step == self.steps or any(_due(step, interval) for interval in intervals)

    def _judge(self, step: int, loss: float) -> None:
        """Judge a skipped step. In fp16, gradients that overflow beside a finite loss only lower the loss scale."""
        scale = self.engine.zero.loss_scale
        if self.engine.skipped and scale is not None and scale.reduced and math.isfinite(loss):
            self.reporter.say(f"step {step} was skipped: its gradients overflow; the loss scale is {scale.value:g}")
            return
        if not self.engine.skipped:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        if self.settings.training.on_nonfinite == "stop":
            why = 'zero_tp.training.on_nonfinite is "stop"'
        elif self.skips_in_a_row > SKIPS_IN_A_ROW:
            why = f"{self.skips_in_a_row} steps in a row were"
        else:
            self.reporter.say(f"step {step} was skipped: its loss or gradients are not finite")
            return
        raise UserError(
            f"step {step}: loss {loss}, gradients not finite ({why}); nothing after the last checkpoint is kept: "
            "lower optimizer.params.lr, or look at the data of this step"
        )

    def _validation(self, samples: ValidationSamples) -> dict[str, float]:
        limit = self.settings.evaluation.batches * self.config.global_batch
        batches = samples.batches(limit, self.config.micro_batch, self.topology.data_rank, self.topology.data)
        return self.engine.evaluate([batch.to(self.device) for batch in batches])


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
