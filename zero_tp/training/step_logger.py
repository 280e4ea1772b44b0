"""Measure each step and log it: loss, gradient norm, learning rate, speed and memory."""

from __future__ import annotations

import math

import torch

from zero_tp.devices import peak_flops
from zero_tp.models.flops import hardware_flops, model_flops
from zero_tp.training.callback import Callback, Metrics, TrainState
from zero_tp.training.lines import format_step
from zero_tp.training.metrics import Speed, StepMeter, memory_gib


class StepLogger(Callback):
    """Log a step every `logging.interval` steps, and each step that was skipped."""

    def __init__(self) -> None:
        self._header = ""

    def on_start(self, state: TrainState) -> None:
        config, engine = state.config, state.engine
        spec, length, batch = engine.model.spec, config.zero_tp.data.sequence_length, config.global_batch
        recomputed = config.zero_tp.recompute_policy.recomputed_layers_and_cores(spec.layers, config.accumulation)
        peak = None
        if engine.device.type == "cuda":
            allow_tf32 = torch.backends.cuda.matmul.allow_tf32
            peak = peak_flops(torch.cuda.get_device_name(), engine.dtype, allow_tf32)
        self._meter = StepMeter(
            batch * length,
            model_flops(spec, batch, length, config.labelled),
            state.topology.world,
            peak,
            state.total_steps,
            hardware_flops=hardware_flops(spec, batch, length, config.labelled, recomputed),
        )

        state.output.open_bar(state.total_steps, state.step)

    def on_step_begin(self, state: TrainState) -> None:
        self._learning_rate = state.engine.learning_rate
        self._meter.start()

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
            self.log(state, *self._measure(state, loss))
        if engine.spike:
            state.print(f"step {step} was skipped as a spike: {engine.spike}")
        if engine.skipped and engine.trace is not None:
            state.print(f"step {step}: {engine.trace.describe()}")

    def log(self, state: TrainState, values: Metrics, speed: Speed) -> None:
        """Print the step's line, the first below its header, and add it to metrics.jsonl."""
        header, line = format_step(values, speed, state.total_steps)
        if header != self._header:
            self._header = header
            state.print(header)
        state.print(line)
        state.log(values)

    def on_end(self, state: TrainState) -> None:
        state.output.close()

    def _measure(self, state: TrainState, loss: float) -> tuple[Metrics, Speed]:
        """Return the step's line of metrics.jsonl, and its speed."""
        engine, speed = state.engine, self._meter.read(state.step)
        values = {
            "step": state.step,
            "consumed_samples": state.step * state.config.global_batch,
            "loss": loss,
            "learning_rate": self._learning_rate,
            "grad_norm": engine.gradient_norm,
            **{name: getattr(speed, name) for name in ("tokens_per_second", "model_tflops", "mfu", "hfu")},
            "memory_gib": memory_gib(engine.device.type),
            "seconds": speed.seconds,
            "loss_scale": engine.loss_scale,
            "skipped_steps": engine.skipped_steps,
        }
        return values | engine.figures, speed

    def _other_work_follows(self, state: TrainState) -> bool:
        block = state.config.zero_tp
        intervals = (block.training.guard_interval, block.evaluation.interval, block.checkpoint.interval)
        return state.is_last_step or any(map(state.is_due, intervals))
