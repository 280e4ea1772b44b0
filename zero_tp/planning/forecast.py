"""What the plan says about a run's memory, at its start, and what was measured beside it, at its end."""

from __future__ import annotations

from dataclasses import replace

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.planning.report import PHASES
from zero_tp.planning.views import true_view
from zero_tp.training.metrics import memory_gib, resident_gib


class Forecast:
    """Of one rank.

    On the CPU memory is resident when it is touched, so of ZeRO's buckets only what gradients can fill is counted; and
    the process holds libraries too.
    """

    def __init__(self, config: RunConfig, device_type: str):
        self.device_type = device_type
        view = true_view(config, cpu=device_type == "cpu")
        if device_type == "cpu":
            zero = view.zero
            filled = min(zero.at.reduce_bucket, zero.parameters.total)
            view = replace(view, zero=replace(zero, at=replace(zero.at, reduce_bucket=filled)))
        point = view.peak
        self.planned = (point.total + (point.host if device_type == "cpu" else 0.0)) / GIB
        self.host = 0.0 if device_type == "cpu" else point.host / GIB
        self.phase = PHASES[point.phase]
        self.before = resident_gib() if device_type == "cpu" else 0.0

    def announcement(self) -> str:
        host = f", and {self.host:.2f} GiB of host memory" if self.host else ""
        return f"plan: at most {self.planned:.2f} GiB of tensors a rank, in {self.phase}{host}"

    def outcome(self) -> str:
        measured = memory_gib(self.device_type)
        if self.device_type == "cpu":
            return (
                f"memory: {self.planned:.2f} GiB of tensors planned; the process held {measured:.2f} GiB at most, "
                f"{self.before:.2f} of them before the first step"
            )
        return f"memory: {self.planned:.2f} GiB planned, {measured:.2f} GiB measured"
