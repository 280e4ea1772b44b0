"""A forecast says what the plan makes of a run's memory at its start, and beside it what was measured at its end."""

from __future__ import annotations

import torch

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import runs_varlen
from zero_tp.planning.memory import rank_memory
from zero_tp.planning.report import PHASES
from zero_tp.process.connect import can_keep_freed_memory
from zero_tp.training.metrics import memory_gib, resident_gib


class MemoryForecast:
    """A MemoryForecast is about one rank. On the CPU its process holds libraries beside its tensors."""

    def __init__(self, config: RunConfig, device_type: str):
        self.device_type = device_type
        cpu = device_type == "cpu"
        point = rank_memory(config, cpu=cpu, varlen=runs_varlen(torch.device(device_type))).peak
        self.planned = (point.total + (point.host if cpu else 0.0)) / GIB
        self.host = 0.0 if cpu else point.host / GIB
        self.phase = PHASES[point.phase]
        self.before = resident_gib() if cpu else 0.0
        self.keeps = config.zero_tp.training.keep_freed_memory and can_keep_freed_memory()

    def announcement(self) -> str:
        host = f", and {self.host:.2f} GiB of host memory" if self.host else ""
        return f"plan: at most {self.planned:.2f} GiB of tensors a rank, in {self.phase}{host}"

    def outcome(self) -> str:
        measured = memory_gib(self.device_type)
        if self.device_type == "cpu":
            return (
                f"memory: {self.planned:.2f} GiB of tensors planned; the process held {measured:.2f} GiB at most, "
                f"{self.before:.2f} of them before the first step" + (", and kept what was freed" if self.keeps else "")
            )
        return f"memory: {self.planned:.2f} GiB planned, {measured:.2f} GiB measured"
