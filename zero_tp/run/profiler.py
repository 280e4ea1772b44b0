"""`pretrain.py --profile-steps FIRST:LAST` records rank 0's steps with torch's profiler."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.files import write_atomically
from zero_tp.run.callback import Callback, TrainState

OPERATORS = 30
MEMORY_EVENTS = 1_000_000


def step_range(text: str, steps: int) -> tuple[int, int]:
    """Return the first and the last step of FIRST:LAST; both are profiled."""
    match = re.fullmatch(r"(\d{1,20}):(\d{1,20})", text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last <= steps:
        raise UserError(
            f"--profile-steps {text}: write FIRST:LAST, from 1 to zero_tp.training.steps, {steps}"
        )
    return first, last


class StepProfiler(Callback):
    """Profile rank 0's steps `first` to `last`.

    A run that resumes between them is profiled from its first step.

    Files in RUN/profile: `steps_FIRST-LAST.json.gz`, a trace of operators and memory for Perfetto
    or TensorBoard; `.txt`, the operators that take the most time; on CUDA also `.pickle`, the
    allocator's snapshot for https://pytorch.org/memory_viz.
    """

    def __init__(self, first: int, last: int):
        self.first = first
        self.last = last
        self._profile: profile | None = None

    def on_start(self, state: TrainState) -> None:
        self._cuda = state.engine.device.type == "cuda"
        if state.step >= self.last:
            steps = f"steps {self.first} to {self.last}"
            state.print(f"--profile-steps: {steps} came before this start; nothing is recorded")

    def on_step_begin(self, state: TrainState) -> None:
        if (
            not state.is_rank_zero
            or self._profile is not None
            or not self.first <= state.step <= self.last
        ):
            return
        # A run that resumes in the middle names its files by what it has recorded.
        self.first = state.step
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        if self._cuda:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        self._profile = profile(activities=activities, profile_memory=True)
        self._profile.start()

    def on_step_end(self, state: TrainState) -> None:
        if self._profile is None or state.step < self.last:
            return
        recorded = self._profile
        self._profile = None
        recorded.stop()
        try:
            state.print(self._write(recorded, state.directory / "profile"))
        except OSError as error:
            state.print(f"the profile could not be written ({first_line(error)})")

    def on_end(self, state: TrainState) -> None:
        if self._profile is not None:
            self._profile.stop()
            state.print(
                f"--profile-steps: the run ended at step {state.step}; no profile was written"
            )

    def _write(self, recorded: profile, directory: Path) -> str:
        """Write the files and return a line that says where they are."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{directory}/steps_{self.first}-{self.last}"
        recorded.export_chrome_trace(f"{name}.json.gz")
        by = "self_device_time_total" if self._cuda else "self_cpu_time_total"
        write_atomically(
            Path(f"{name}.txt"), recorded.key_averages().table(sort_by=by, row_limit=OPERATORS)
        )
        if self._cuda:
            torch.cuda.memory._dump_snapshot(f"{name}.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        return f"profile of steps {self.first} to {self.last}: {name}.json.gz"
