"""Forecast a run's memory at its start, and compare it with the measured one at its end."""

from __future__ import annotations

import torch

from zero_tp.config import RunConfig
from zero_tp.constants import GIB
from zero_tp.devices import Device, find_device, named_device, runs_varlen
from zero_tp.errors import first_line
from zero_tp.planning.isolated import run_isolated
from zero_tp.planning.memory import Point, rank_memory
from zero_tp.planning.plan import plan
from zero_tp.planning.report import PHASES
from zero_tp.process.heap import can_keep_freed_memory
from zero_tp.training.callback import Callback, TrainState
from zero_tp.training.metrics import memory_gib, resident_gib


class MemoryForecast(Callback):
    """Print the planned peak memory of rank 0 before the first step, and beside it the measured one at the end.

    On the CPU a rank's process holds libraries beside its tensors. Where tensor parallel groups span machines, also
    print what that costs.
    """

    def __init__(self) -> None:
        self._planned: float | None = None

    def on_start(self, state: TrainState) -> None:
        if not state.is_rank_zero:
            return
        device_type = state.engine.device.type
        try:
            state.print(self.announce(state.config, device_type))
            if state.machines > 1 and (cost := _crossing(state.config, device_type)):
                state.print(f"TP between machines: {cost}")
        except Exception as error:  # the plan is for people; a run does not depend on it
            state.print(f"plan: none; the planner failed: {type(error).__name__}: {first_line(error)}")

    def announce(self, config: RunConfig, device_type: str) -> str:
        """Plan the run and return a line for its start."""
        cpu = device_type == "cpu"
        if cpu:
            point = rank_memory(config, cpu=True).peak
        else:
            point = run_isolated(_peak_of_accelerator, config, runs_varlen(_current(device_type)))
        self._planned = (point.total + (point.host if cpu else 0.0)) / GIB
        self._before = resident_gib() if cpu else 0.0
        self._keeps_freed = config.zero_tp.training.keep_freed_memory and can_keep_freed_memory()
        host = f", and {point.host / GIB:.2f} GiB of host memory" if point.host and not cpu else ""
        return f"plan: at most {self._planned:.2f} GiB of tensors a rank, in {PHASES[point.phase]}{host}"

    def on_end(self, state: TrainState) -> None:
        if self._planned is not None and state.error is None:
            state.print(self.outcome(state.engine.device.type))

    def outcome(self, device_type: str) -> str:
        """Return a line for the run's end: planned and measured memory."""
        measured = memory_gib(device_type)
        if device_type == "cpu":
            return (
                f"memory: {self._planned:.2f} GiB of tensors planned; the process held {measured:.2f} GiB at most, "
                f"{self._before:.2f} of them before the first step"
                + (", and kept what was freed" if self._keeps_freed else "")
            )
        return f"memory: {self._planned:.2f} GiB planned, {measured:.2f} GiB measured"


def _crossing(config: RunConfig, device_type: str) -> str:
    """Return what TP between machines costs; "" where the planner does not know the links of this device."""
    device = find_device(torch.cuda.get_device_name()) if device_type == "cuda" else None
    if device is None or not device.plans:
        return ""
    return run_isolated(crossing_cost, config, named_device(next(iter(device.plans))))


def _peak_of_accelerator(config: RunConfig, varlen: bool) -> Point:
    return rank_memory(config, cpu=False, varlen=varlen).peak


def _current(device_type: str) -> torch.device:
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def crossing_cost(config: RunConfig, device: Device) -> str:
    """Return in words what a step takes when TP crosses machines, beside one where each machine has whole TP groups."""
    tensor = config.zero_tp.parallel.tensor
    inside, across = (plan(config, device.model_copy(update={"per_node": size})).time for size in (tensor, 1))
    return (
        f"on {device.name} the planner expects {across.tensor:.3g} s of TP communication a step instead of "
        f"{inside.tensor:.3g}, {across.total / inside.total:.2f} times the step"
    )
