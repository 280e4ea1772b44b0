"""Measure the speed and size of a step: FLOPs, MFU, tokens a second, time left, memory.

Letters: B global batch [sequences], s sequence length [tokens], L layers, h hidden size, v vocabulary size.
"Device" is one rank: one accelerator, or one CPU process.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zero_tp.constants import GIB
from zero_tp.models.flops import utilisation


@dataclass(frozen=True)
class Speed:
    """The speed of a step, as a mean over the steps since the last reading."""

    seconds: float
    tokens_per_second: float  # all devices together
    tokens_per_second_per_device: float
    model_tflops: float  # TFLOP/s of one device, recomputation not counted
    mfu: float | None  # 0..1
    hfu: float | None  # 0..1, with recomputation
    eta_seconds: float | None  # None before the first step
    elapsed_seconds: float  # since this start's first step began, with all work between steps
    tokens: int  # that the run has seen


class StepMeter:
    """Times steps: `start()` before and `tick()` after every step, `read(step)` when one is logged.

    Work between a tick and the next start (validation, saving) counts for no step.

    Args:
        tokens_per_step: global batch × sequence length.
        flops_per_step: model FLOPs of one step, all devices.
        hardware_flops: those that one step runs, where backward computes some again.
        devices: ranks of the job.
        peak_flops: of one device [FLOP/s], or None.
        total_steps: the run's last step.
        window: steps in the moving average behind the time left. The first step of a start (warming caches, compiling)
            is left out of it as soon as there is another.
    """

    def __init__(
        self,
        tokens_per_step: int,
        flops_per_step: float,
        devices: int,
        peak_flops: float | None,
        total_steps: int,
        window: int = 50,
        hardware_flops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_step = flops_per_step
        self.hardware_flops = flops_per_step if hardware_flops is None else hardware_flops
        self.devices = devices
        self.peak_flops = peak_flops
        self.total_steps = total_steps
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=window)
        self._ticks = 0
        self._unread: list[float] = []
        self._begin = self._last = clock()

    def start(self) -> None:
        """Start the clock of a step; without it the step counts from the end of the one before."""
        self._last = self._clock()

    def tick(self) -> None:
        """Note that a step has ended."""
        now = self._clock()
        seconds, self._last = now - self._last, now
        if self._ticks == 1:
            self._recent.clear()
        self._ticks += 1
        self._recent.append(seconds)
        self._unread.append(seconds)

    def read(self, step: int) -> Speed:
        """Return the speed of the steps since the last reading, the last of them being `step`."""
        assert self._unread, "read() before tick()"
        seconds = sum(self._unread) / len(self._unread)
        self._unread.clear()
        tokens_per_second = self.tokens_per_step / seconds
        return Speed(
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            tokens_per_second_per_device=tokens_per_second / self.devices,
            model_tflops=self.flops_per_step / seconds / self.devices / 1e12,
            mfu=utilisation(self.flops_per_step, seconds, self.devices, self.peak_flops),
            hfu=utilisation(self.hardware_flops, seconds, self.devices, self.peak_flops),
            eta_seconds=max(0, self.total_steps - step) * sum(self._recent) / len(self._recent),
            elapsed_seconds=self._last - self._begin,
            tokens=step * self.tokens_per_step,
        )


def memory_gib(device_type: str = "cpu") -> float:
    """Return the peak memory of this rank in GiB (2³⁰ bytes).

    On "cuda" the most that torch's allocator had in use (`max_memory_allocated`), without the context's 1-2 GB. On
    "cpu" the most memory that the process had resident, with libraries and shared pages.
    """
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    # Not getrusage: after fork and exec its maximum still is the launcher's.
    return _status_bytes("VmHWM") / GIB


def resident_gib() -> float:
    """Return the memory that this process has resident now, in GiB."""
    return _status_bytes("VmRSS") / GIB


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
