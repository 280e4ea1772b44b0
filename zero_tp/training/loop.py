"""A run is trained from its config to its last checkpoint, with tools of other packages that it may be given."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zero_tp.checkpoint.directory import MANIFEST, step_directory
from zero_tp.checkpoint.found import Found, agree, look, probed, take_whole
from zero_tp.checkpoint.manifest import UNHASHED, Manifest, Parallelism, Parent, differences
from zero_tp.checkpoint.resume import check_all_there, resume
from zero_tp.checkpoint.run import run_directory, saved_start, write_config
from zero_tp.checkpoint.save import Saver
from zero_tp.config.schema import Timeouts
from zero_tp.data.samples import FixedSamples, ReadAhead
from zero_tp.devices import device_peak_flops
from zero_tp.errors import UserError
from zero_tp.models.attention import back_ends, described
from zero_tp.models.flops import hardware_flops, model_flops
from zero_tp.parallel.agreement import most_machines
from zero_tp.parallel.parameter import Zeros
from zero_tp.process.connect import connect_deepspeed
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.quiet import hushed
from zero_tp.training.engine import TrainingEngine
from zero_tp.training.guards import check_replicas
from zero_tp.training.metrics import StepMeter, memory_gib
from zero_tp.training.report import Reporter, StepRecord
from zero_tp.training.run import PreparedRun
from zero_tp.training.tools import Forecast, Requests, Tools

SKIPS_IN_A_ROW = 10
SAVE_SLACK_SECONDS = 15.0


def train(
    run: PreparedRun,
    environment: RankEnvironment,
    requests: Requests,
    *,
    tools: Tools | None = None,
    verbose: bool,
    resume_from: Path | None = None,
    trace_nonfinite: bool = False,
) -> None:
    """Train, validate and save until the run's steps are done, from where its directory left off. Collective.

    Args:
        requests: raised by signals: to save, or to save and stop.
        tools: what the loop calls beside its own work.
        resume_from: the checkpoint to start from, instead of the newest.
        trace_nonfinite: say of every step that is not finite which layer and rank was the first.

    Raises:
        UserError: nothing says where the ranks meet, a setting does not work here, a checkpoint cannot be resumed, or
            the loss is not finite and `on_nonfinite` says stop, or 10 steps in a row were skipped.
    """
    environment.export()  # before anything is written
    tools = tools or Tools()
    config, directory, watch = run.config, run.directory, tools.watch
    if watch is not None:
        watch.begin(_limits(config.zero_tp.training.timeouts), environment.rank, environment.world)
    held: AbstractContextManager[None] = nullcontext()
    if environment.rank == 0:
        held = run_directory(directory, watch.fail if watch is not None else lambda text: None)
    with held, ExitStack() as stack:
        if tools.keep is not None and environment.rank == 0:
            tools.keep(directory)
        looked = partial(look, directory, config, resume_from, run.check_resumed)
        found = looked()
        topology, device = connect_deepspeed(config, environment, verbose)
        stack.enter_context(back_ends(device))
        if watch is not None:
            watch.connect()
        with probed(directory) as probe:
            seen = {f"{directory}: the ranks do not see the same directory": probe}
            found = agree(found, directory, seen | run.read(), looked)
        if tools.keep is not None and environment.rank > 0:  # rank 0 has made the directory
            tools.keep(directory)
        origin = Found() if tools.origin is None else tools.origin.look(found, directory, config, run.model_config)
        if found.checkpoint is not None:
            found = take_whole(found, directory, config, check_all_there, resume_from)
        if tools.origin is not None:
            origin = agree(origin, directory)
        if origin.checkpoint is not None:
            check_all_there(origin.checkpoint)
        drawn = found.checkpoint is None and origin.checkpoint is None
        pretrained = run.pretrained() if drawn else None
        with hushed(verbose):
            engine = TrainingEngine(
                run.model_config,
                topology,
                config.deepspeed_config(),
                seed=config.zero_tp.training.seed,
                device=device,
                source=pretrained if drawn else Zeros(),
                model=tools.model,
                recompute=config.zero_tp.recompute_policy,
                spike=config.zero_tp.training.spike,
                trace_nonfinite=trace_nonfinite,
                compiled=config.zero_tp.compile,
            )
            if found.checkpoint is not None:
                take = partial(resume, engine.zero, seed=config.zero_tp.training.seed)
                found = take_whole(found, directory, config, take, resume_from)
            elif tools.origin is not None and origin.checkpoint is not None:
                tools.origin.take(engine.zero, origin.checkpoint)
        manifest = found.manifest
        machines = most_machines(topology) if environment.several_nodes else 1
        step = manifest.step if manifest is not None else 0
        finished = step >= config.zero_tp.training.steps
        forecast = None
        if topology.rank == 0:
            for note in found.notes:
                print(note)
            if pretrained is not None and pretrained.drawn:
                print(pretrained.told())
            _announce(run, engine, manifest)
            if tools.origin is not None and origin.manifest is not None:
                print("\n".join(tools.origin.told(origin, config, run.corpora, run.validation_corpora)))
            if not finished:
                write_config(directory, config.resolved())
            if not finished and tools.forecast is not None:
                forecast = tools.forecast(config, device.type)
                print(forecast.announcement())
            if machines > 1:
                cost = forecast.crossing() if forecast is not None else ""
                print(f"TP crosses machines, {machines} of them in a group{': ' if cost else ''}{cost}")
        if not finished:
            parent = None if manifest is None else manifest.parent
            if origin.checkpoint is not None and origin.manifest is not None:
                parent = Parent.of(origin.checkpoint, origin.manifest)
            _Loop(run, engine, step, requests, tools, forecast, parent).train()
        if watch is not None:
            watch.leave()


def _limits(timeouts: Timeouts) -> dict[str, float | None]:
    """Return how long each phase may go without a mark [seconds]. A save ends by itself, after two of its limits."""
    return {
        "start": 60 * timeouts.start if timeouts.start is not None else None,
        "step": 60 * timeouts.step,
        "save": 2 * 60 * timeouts.save + SAVE_SLACK_SECONDS,
        "evaluation": 60 * timeouts.evaluation,
    }


def _announce(run: PreparedRun, engine: TrainingEngine, manifest: Manifest | None) -> None:
    config, steps = run.config, run.config.zero_tp.training.steps
    print(
        f"{run.model_config.model_type}: {engine.model.num_parameters():,} parameters, {config.dtype}, "
        f"{engine.topology.describe()}, ZeRO-{config.zero_stage}, "
        f"{config.global_batch} × {config.zero_tp.data.sequence_length} tokens a step, in {run.directory}"
    )
    spec, data = engine.model.spec, config.zero_tp.data
    documents = data.document_attention == "reset"
    sizes = (engine.topology.tensor, config.micro_batch, data.sequence_length)
    rows = {"documents": documents, "padded": not spec.causal}
    print(f"attention: {described(spec, *sizes, engine.dtype, engine.device, **rows)}")
    for note in (*engine.activations.notes, *(f"without effect: {line}" for line in config.without_effect())):
        print(note)
    if config.zero_tp.compile:
        print("compile: the first step waits for torch's compiler, about a minute where its cache has nothing yet")
    step = manifest.step if manifest is not None else 0
    if step >= steps:
        print(f"the run is at step {step}, zero_tp.training.steps is {steps}: nothing to do; raise it to train on")
        return
    if manifest is not None:
        before, now = Parallelism.saved(manifest), Parallelism.of(config)
        print(f"resuming step {step}" + ("" if before == now else f" saved at {before} → {now}"))
        if not manifest.hashed:
            print(f"its {MANIFEST} is {UNHASHED}")
        for line in differences(
            manifest, config, manifest.config or saved_start(run.directory)[0], run.validation_corpora
        ):
            print(line)
    schedule = config.deepspeed_config().get("scheduler", {}).get("params", {}).get("total_num_steps")
    if schedule is not None and schedule < steps:
        print(f"the learning rate's schedule ends at step {schedule}; from there to step {steps} it holds its minimum")


class _Loop:
    def __init__(
        self,
        run: PreparedRun,
        engine: TrainingEngine,
        done: int,
        requests: Requests,
        tools: Tools,
        forecast: Forecast | None,
        parent: Parent | None,
    ):
        self.tasks, self.forecast = tools.tasks, forecast
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
        self.ahead: ReadAhead[Any] = ReadAhead(self._read, self.steps)
        self.watch = tools.watch
        if self.watch is not None:
            engine.mark = self.watch.mark
        self.saver = Saver(
            engine.zero, self.config, run.directory, run.tokenizer, run.corpora, run.validation_corpora, done, parent
        )

    def _read(self, step: int) -> list[Any]:
        """Return what this rank trains on at `step`."""
        return self.run.samples.rank_batches(
            step - 1,
            self.config.global_batch,
            self.config.micro_batch,
            self.config.accumulation,
            self.topology.data_rank,
            self.topology.data,
        )

    def train(self) -> None:
        with self.reporter as reporter, self.requests.accepting(), self.ahead:
            self.meter.start()
            for step in range(self.done + 1, self.steps + 1):
                self._enter("step", step)
                self._step(step)
                last = step == self.steps
                with self.meter.paused():
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
            loss = self.engine.train_step(
                [batch.to(self.device) for batch in batches],
                guarded=step if _due(step, self.settings.training.guard_interval) else None,
                guard_gradients=self.settings.training.guard_gradients,
            )
        self.meter.tick()
        if self.profiler is not None and (told := self.profiler.outcome(step)):
            self.reporter.say(told)
        self.reporter.advance(step)
        if self.reporter.due(step) or self.engine.skipped or self.engine.spike:
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

    def _validation(self, samples: FixedSamples[Any]) -> dict[str, float]:
        limit = self.settings.evaluation.batches * self.config.global_batch
        batches = samples.batches(limit, self.config.micro_batch, self.topology.data_rank, self.topology.data)
        return self.engine.evaluate([batch.to(self.device) for batch in batches])


def _due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
