"""A forecast says what the plan makes of a run's memory at its start, and beside it what was measured at its end."""

from __future__ import annotations

import torch

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import Device, find_device, named_device, runs_varlen
from zero_tp.planning.memory import rank_memory
from zero_tp.planning.plan import plan
from zero_tp.planning.report import PHASES
from zero_tp.process.heap import can_keep_freed_memory
from zero_tp.training.metrics import memory_gib, resident_gib


class MemoryForecast:
    """A MemoryForecast is about one rank. On the CPU its process holds libraries beside its tensors."""

    def __init__(self, config: RunConfig, device_type: str):
        self.config, self.device_type = config, device_type
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

    def crossing(self) -> str:
        """Return what TP between machines costs, by the planner; nothing where it knows no links of this device."""
        known = find_device(torch.cuda.get_device_name()) if self.device_type == "cuda" else None
        if known is None or not known.plans:
            return ""
        return crossing_cost(self.config, named_device(next(iter(known.plans))))

    def outcome(self) -> str:
        measured = memory_gib(self.device_type)
        if self.device_type == "cpu":
            return (
                f"memory: {self.planned:.2f} GiB of tensors planned; the process held {measured:.2f} GiB at most, "
                f"{self.before:.2f} of them before the first step" + (", and kept what was freed" if self.keeps else "")
            )
        return f"memory: {self.planned:.2f} GiB planned, {measured:.2f} GiB measured"


def crossing_cost(config: RunConfig, device: Device) -> str:
    """Return in words what a step takes when TP crosses machines, beside one where each machine has whole TP groups."""
    tensor = config.zero_tp.parallel.tensor
    inside, across = (plan(config, device.model_copy(update={"per_node": size})).time for size in (tensor, 1))
    return (
        f"on {device.name} the planner expects {across.tensor:.3g} s of TP communication a step instead of "
        f"{inside.tensor:.3g}, {across.total / inside.total:.2f} times the step"
    )
