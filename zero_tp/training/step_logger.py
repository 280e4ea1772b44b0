"""Measure each step and log it: loss, gradient norm, learning rate, speed and memory."""

from __future__ import annotations

import math

import torch.distributed as dist

from zero_tp.devices import device_peak_flops
from zero_tp.models.flops import hardware_flops, model_flops
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.lines import StepRecord, format_header, format_line
from zero_tp.training.metrics import StepMeter, memory_gib

LOGGED = (
    *("step", "consumed_samples", "loss", "learning_rate", "grad_norm"),
    *("tokens_per_second", "model_tflops", "mfu", "hfu", "memory_gib", "seconds"),
    *("loss_scale", "skipped_steps"),
)
"""Fields of StepRecord and Speed that a step's line of metrics.jsonl has."""


class StepLogger(Callback):
    """Log a step every `logging.interval` steps, and each step that was skipped.

    Args:
        terminal: show a progress bar; None: only if stdout and stderr are terminals.
    """

    def __init__(self, terminal: bool | None = None) -> None:
        self._terminal = terminal
        self._first = True

    def on_start(self, state: TrainState) -> None:
        config, engine = state.config, state.engine
        spec, length, batch = engine.model.spec, config.zero_tp.data.sequence_length, config.global_batch
        recomputed = config.zero_tp.recompute_policy.recomputed_layers_and_cores(spec.layers, config.accumulation)
        self._meter = StepMeter(
            batch * length,
            model_flops(spec, batch, length, config.labelled),
            state.topology.world,
            device_peak_flops(engine.device.type, engine.dtype, dist.barrier),
            state.total_steps,
            hardware_flops=hardware_flops(spec, batch, length, config.labelled, recomputed),
        )

    def on_step_begin(self, state: TrainState) -> None:
        if self._first:
            self._first = False
            self.print_header(state)
        self._learning_rate = state.engine.learning_rate
        self._meter.start()

    def print_header(self, state: TrainState) -> None:
        state.output.open_bar(state.total_steps, state.step - 1, self._terminal)
        state.print(format_header(state.total_steps, state.engine.model.figures))

    def on_step_end(self, state: TrainState) -> None:
        engine, step = state.engine, state.step
        logged = state.is_due(state.config.zero_tp.logging.interval) or step == state.total_steps
        logged = logged or engine.skipped or bool(engine.spike)
        # Reading the loss synchronises with the device. It is read before the clock stops, on steps that log,
        # evaluate or save, so that the device's work counts as the step's.
        loss = engine.loss if logged or self._other_work_follows(state) else math.nan
        self._meter.tick()
        state.output.advance(step)
        if logged:
            self.log(state, self._record(state, loss))
        if engine.spike:
            state.print(f"step {step} was skipped as a spike: {engine.spike}")
        if engine.skipped and engine.trace is not None:
            state.print(f"step {step}: {engine.trace.told()}")

    def log(self, state: TrainState, record: StepRecord) -> None:
        """Print the step's line and add it to metrics.jsonl."""
        state.print(format_line(record, state.total_steps))
        values = {**vars(record), **vars(record.speed)}
        state.log({name: values[name] for name in LOGGED} | dict(record.figures))

    def on_end(self, state: TrainState) -> None:
        state.output.close()

    def _record(self, state: TrainState, loss: float) -> StepRecord:
        engine = state.engine
        return StepRecord(
            state.step,
            state.step * state.config.global_batch,
            loss,
            self._learning_rate,
            engine.gradient_norm,
            self._meter.read(state.step),
            memory_gib(engine.device.type),
            engine.loss_scale,
            engine.skipped_steps,
            engine.figures,
        )

    def _other_work_follows(self, state: TrainState) -> bool:
        block = state.config.zero_tp
        intervals = (block.training.guard_interval, block.evaluation.interval, block.checkpoint.interval)
        return state.is_last_step or any(map(state.is_due, intervals))
