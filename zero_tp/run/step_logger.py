"""Measure each step and log it: loss, gradient norm, learning rate, speed and memory.

"Device" is one rank: one accelerator, or one CPU process.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from zero_tp.base.errors import write_stderr
from zero_tp.base.settings.timeline import StepSamples
from zero_tp.model.flops import hardware_flops, model_flops, utilisation
from zero_tp.parallel.devices import peak_flops
from zero_tp.run.callback import Callback, Metrics, TrainState
from zero_tp.run.metrics import memory_gib

LINE_SECONDS = 5.0  # between printed lines, if logging.interval is "auto"
WINDOW = 50  # the last steps, whose median predicts the time left


class StepTimer:
    """Times steps.

    Work between `stop` and the next `start` (validation, saving) counts for no step.

    Attributes:
        elapsed: seconds from this object's creation to the end of the last step, with all work
            between steps.
        steps_read: number of steps of the last reading.
    """

    steps_read = 0

    def __init__(
        self, window: int = WINDOW, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self.elapsed = 0.0
        self._first = self._begin = clock()
        # Two memories: a line has the mean of all steps since the last line, the estimate the
        # median of recent ones.
        self._unread = list[float]()
        self._recent = deque[float](maxlen=window)

    def start(self) -> None:
        self._begin = self._clock()

    def stop(self) -> None:
        end = self._clock()
        self.elapsed = end - self._first
        self._unread.append(end - self._begin)
        self._recent.append(end - self._begin)

    def read(self) -> float:
        """Return the mean seconds of the steps since the last reading."""
        seconds = statistics.fmean(self._unread)
        self.steps_read = len(self._unread)
        self._unread.clear()
        return seconds

    def estimate(self, steps: int) -> float:
        """Estimate the seconds of further steps.

        The median of the last ones ignores a first step that compiles.
        """
        return steps * statistics.median(self._recent)


class RunProgress(NamedTuple):
    """What the console shows in addition to metrics.jsonl.

    The tokens of all steps, the number of devices, and times in seconds.
    """

    tokens: int
    devices: int
    elapsed: float
    left: float


class StepLogger(Callback):
    """Log a step every `logging.interval` steps, and each step that was skipped.

    On terminals it shows a progress bar.

    With the interval "auto" each step is logged, but its line is printed only every `LINE_SECONDS`.

    Args:
        clock: gives the time of the lines [seconds].
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._header = ""
        self._clock = clock
        self._last_line = -math.inf

    def on_start(self, state: TrainState) -> None:
        engine = state.engine
        # Of the steps since the last line.
        self._model_flops = self._hardware_flops = 0.0
        self._flops: dict[tuple[int, int], tuple[float, float]] = {}
        self._logged_tokens = state.config.timeline.step_samples(state.step + 1).tokens_before
        self._peak = None
        if engine.device.type == "cuda":
            # In fp32 the peak depends on it: TF32 products are done by the tensor cores.
            allow_tf32 = torch.backends.cuda.matmul.allow_tf32
            self._peak = peak_flops(torch.cuda.get_device_name(), engine.dtype, allow_tf32)
        self._timer = StepTimer()
        self.open_bar(state)

    def open_bar(self, state: TrainState) -> None:
        """Show a progress bar if stdout and stderr are terminals."""
        total = state.total_steps
        step = state.step
        # In a file, a bar would be a line for each of its updates.
        hidden = not (state.is_rank_zero and sys.stdout.isatty() and sys.stderr.isatty())
        self.bar: tqdm[NoReturn] = tqdm(
            total=total, initial=step, unit="step", dynamic_ncols=True, leave=False, disable=hidden
        )

    def on_step_begin(self, state: TrainState) -> None:
        # Before the step: the scheduler moves on at its end, to the rate of the next one.
        self._learning_rate = state.engine.learning_rate
        self._timer.start()

    def on_step_end(self, state: TrainState) -> None:
        engine = state.engine
        step = state.step
        block = state.config.zero_tp
        skipped = engine.skipped or bool(engine.spike)
        logged = (
            skipped or state.is_due(block.logging.measured_interval) or step == state.total_steps
        )
        intervals = (
            block.training.guard_interval,
            block.evaluation.interval,
            block.checkpoint.interval,
        )
        # Of a run of steps the last one's wait counts the work of all. Where something else
        # follows, the device's work still counts as the step's.
        if state.is_last_step or any(map(state.is_due, intervals)):
            get_accelerator().synchronize()
        loss = engine.loss if logged else math.nan
        self._timer.stop()
        self._count_flops(state)
        self.bar.update()
        if logged:
            self._log(state, loss)
        if engine.spike:
            state.print(f"step {step} was skipped as a spike: {engine.spike}")

    def _count_flops(self, state: TrainState) -> None:
        """Add the FLOPs of this step, which differ between stages."""
        config = state.config
        samples = config.timeline.step_samples(state.step)
        key = (samples.stage, samples.samples)
        if key not in self._flops:
            self._flops[key] = self._step_flops(state, samples)
        of_model, of_hardware = self._flops[key]
        self._model_flops += of_model
        self._hardware_flops += of_hardware

    def _step_flops(self, state: TrainState, samples: StepSamples) -> tuple[float, float]:
        """Return the FLOPs of a step of the model, and of the hardware."""
        config = state.config
        stage = config.stages[samples.stage]
        spec = state.engine.model.spec
        recomputed = stage.recompute.recomputed_layers_and_cores(
            spec.layers, stage.accumulation(samples.samples)
        )
        sizes = (spec, samples.samples, samples.length, config.label_fraction)
        return model_flops(*sizes), hardware_flops(*sizes, recomputed)

    def _log(self, state: TrainState, loss: float) -> None:
        """Measure the steps since the last line, and log this one."""
        engine = state.engine
        timeline = state.config.timeline
        consumed = timeline.step_samples(state.step + 1)
        tokens = consumed.tokens_before
        mean_seconds = self._timer.read()
        steps = self._timer.steps_read
        seconds = mean_seconds * steps
        world = state.topology.world
        values = {
            "step": state.step,
            "consumed_samples": consumed.samples_before,
            "consumed_tokens": tokens,
            "loss": loss,
            "learning_rate": self._learning_rate,
            "grad_norm": engine.gradient_norm,
            "tokens_per_second": (tokens - self._logged_tokens) / seconds,
            "model_tflops": self._model_flops / seconds / world / 1e12,
            "mfu": utilisation(self._model_flops, seconds, world, self._peak),
            "hfu": utilisation(self._hardware_flops, seconds, world, self._peak),
            "memory_gib": memory_gib(engine.device.type),
            "seconds": mean_seconds,
            "loss_scale": engine.loss_scale,
            "skipped_steps": engine.skipped_steps,
        }
        # By tokens, because the steps of stages differ.
        left_tokens = timeline.tokens - tokens
        left = self._timer.estimate(1) * left_tokens / timeline.step_samples(state.step).tokens
        progress = RunProgress(tokens, world, self._timer.elapsed, left)
        self._logged_tokens = tokens
        self._model_flops = self._hardware_flops = 0.0
        values |= engine.figures | engine.attention_figures
        self.log(state, values, progress, line=self._is_line_due(state))

    def log(
        self, state: TrainState, values: Metrics, progress: RunProgress, *, line: bool = True
    ) -> None:
        """Add the step's values to metrics.jsonl.

        With `line` they are printed, the first time below their header.
        """
        if line:
            self._last_line = self._clock()
            header, text = format_step(values, progress, state.total_steps)
            if header != self._header:
                self._header = header
                state.print(header)
            state.print(text)
        state.log(values)

    def _is_line_due(self, state: TrainState) -> bool:
        """Return whether to print this step's line.

        Always, except that "auto" leaves out most lines.
        """
        is_notable = state.engine.skipped or state.engine.spike or state.is_last_step
        seconds = self._clock() - self._last_line
        return (
            state.config.zero_tp.logging.interval != "auto"
            or bool(is_notable)
            or seconds >= LINE_SECONDS
        )

    def on_end(self, state: TrainState) -> None:
        self.bar.close()
        for target, count in state.lost_writes.items():
            write_stderr(f"{target}: {count} {'writes were' if count > 1 else 'write was'} lost")


def format_number(value: float) -> str:
    """Format a loss or norm with four decimals, very small or large ones in scientific form."""
    is_plain = value == 0 or 1e-2 <= abs(value) < 1e3 or not math.isfinite(value)
    return f"{value:.4f}" if is_plain else f"{value:.2e}"


def format_rate(value: float) -> str:
    """Format a rate in few characters: 0.0123, 4.567, 732.1, 98.8k, 1.23M."""
    return f"{value:.4g}" if abs(value) < 1e4 else tqdm.format_sizeof(value)


def format_figure(name: str, value: float) -> str:
    if name.endswith("accuracy"):
        return f"{value:.1%}"
    return f"{value:.2f}" if name == "perplexity" else f"{value:.4f}"


def format_step(
    values: Mapping[str, Any], progress: RunProgress, total_steps: int
) -> tuple[str, str]:
    """Format a step's line of metrics.jsonl for the console.

    Returns the names of its columns, and the line below them.

    "dev" is one device: an accelerator, or a CPU rank. MFU has a column where the device's peak is
    known, HFU where backward also computes some of forward again.
    """
    step = values["step"]
    speed = values["tokens_per_second"]
    cells = {
        "step": f"{step:>{len(str(total_steps))}}/{total_steps}",
        "loss": format_number(values["loss"]),
    }
    for name, value in values.items():
        if name.endswith("_accuracy"):
            cells[name.replace("_accuracy", " right")] = f"{value:.1%}"
        elif name in ("aux_loss", "z_loss", "router_z_loss"):
            cells[name.replace("_", " ")] = format_number(value)
    cells |= {
        "lr": f"{values['learning_rate']:.2e}",
        "grad norm": format_number(values["grad_norm"]),
        "tokens": format_rate(progress.tokens),
        "tok/s/dev": format_rate(speed / progress.devices),
        "tok/s": format_rate(speed),
        "TFLOP/s/dev": format_rate(values["model_tflops"]),
    }
    if values["mfu"] is not None:
        cells["MFU"] = f"{values['mfu']:.1%}"
        if values["hfu"] not in (None, values["mfu"]):
            cells["HFU"] = f"{values['hfu']:.1%}"
    cells["peak GiB"] = f"{values['memory_gib']:.2f}"
    cells |= {
        "elapsed": tqdm.format_interval(progress.elapsed),
        "left": tqdm.format_interval(progress.left),
    }
    widths = [max(8, len(title), len(text)) for title, text in cells.items()]
    header = "  ".join(title.rjust(width) for title, width in zip(cells, widths, strict=True))
    return header, "  ".join(
        text.rjust(width) for text, width in zip(cells.values(), widths, strict=True)
    )
