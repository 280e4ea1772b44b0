"""Forecast a run's memory at its start, and compare it with the measured one at its end."""

from __future__ import annotations

import torch

from zero_tp.base.constants import in_gib
from zero_tp.base.errors import first_line
from zero_tp.parallel.devices import runs_flash
from zero_tp.run.callback import Callback, TrainState
from zero_tp.run.config import RunConfig
from zero_tp.run.metrics import memory_gib, resident_gib
from zero_tp.tools.planning.memory import largest_stage, rank_memory
from zero_tp.tools.planning.plan_report import PHASES
from zero_tp.tools.planning.plan_settings import workload_of


class MemoryForecast(Callback):
    """Print rank 0's planned peak memory before the first step, and the measured one at the end.

    On the CPU the measured peak includes libraries.
    """

    def __init__(self) -> None:
        self._planned: float | None = None
        self._resident_before = 0.0

    def on_start(self, state: TrainState) -> None:
        if not state.is_rank_zero:
            return
        try:
            state.print(self.describe_plan(state.config, state.engine.device.type))
        except Exception as error:  # a failure of the planner must not end a run
            state.print(
                f"plan: none; the planner failed: {type(error).__name__}: {first_line(error)}"
            )

    def describe_plan(self, config: RunConfig, device_type: str) -> str:
        """Plan the run and return the line that is printed at its start."""
        cpu = device_type == "cpu"
        varlen = cpu or runs_flash(_current_device(device_type))
        largest = largest_stage(
            config, lambda one: rank_memory(one, workload_of(one, cpu=cpu, varlen=varlen))
        )
        point = largest.memory.peak
        # A CPU rank's offloaded states are in the same memory as its others.
        self._planned = point.total + (point.host if cpu else 0.0)
        self._resident_before = resident_gib() if cpu else 0.0
        host = f", and {in_gib(point.host)} GiB of host memory" if point.host and not cpu else ""
        return (
            f"plan: at most {in_gib(self._planned)} GiB of tensors a rank, in "
            f"{PHASES[point.phase]}{host}" + (f", in stage {largest.name}" if largest.name else "")
        )

    def on_end(self, state: TrainState) -> None:
        # A run that failed may not have reached its peak.
        if self._planned is None or state.error is not None:
            return
        device_type = state.engine.device.type
        measured = memory_gib(device_type)
        if device_type == "cpu":
            state.print(
                f"memory: {in_gib(self._planned)} GiB of tensors planned; the process held "
                f"{measured:.2f} GiB at most, "
                f"{self._resident_before:.2f} of them before the first step"
            )
        else:
            state.print(f"memory: {in_gib(self._planned)} GiB planned, {measured:.2f} GiB measured")


def _current_device(device_type: str) -> torch.device:
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
