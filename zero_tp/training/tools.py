"""A run's tools come from other packages: they forecast, profile, watch, and evaluate tasks beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from zero_tp.checkpoint.found import Found
from zero_tp.config import RunConfig
from zero_tp.models.model import ParallelModel
from zero_tp.training.engine import TrainingEngine
from zero_tp.training.report import Monitors
from zero_tp.zero.engine import ZeroEngine


class Forecast(Protocol):
    """A forecast says what a run will take, and at its end what it took (zero_tp/planning/forecast.py)."""

    def announcement(self) -> str:
        """Return a line for the run's start."""

    def crossing(self) -> str:
        """Return what TP between machines costs, where that is known."""

    def outcome(self) -> str:
        """Return a line for the run's end."""


class Profiler(Protocol):
    """A profiler records some steps of one rank (zero_tp/planning/profile.py)."""

    def around(self, step: int) -> AbstractContextManager[None]:
        """Return the context that `step` runs in."""

    def outcome(self, step: int) -> str | None:
        """Return a line after the last step that is recorded, else None."""


class Watch(Protocol):
    """A watch knows what this rank does, and ends it when it hangs (zero_tp/process/watch.py)."""

    def begin(self, limits: Mapping[str, float | None], rank: int, world: int, heartbeat: float | None = None) -> None:
        """Start to watch, with the limit of each phase, and of another rank's silence [seconds]."""

    def connect(self) -> None:
        """Begin to tell the other ranks."""

    def leave(self) -> None:
        """Watch no more."""

    def fail(self, text: str) -> None:
        """End this rank, from any thread; `text` says why."""

    def enter(self, phase: str, step: int = 0) -> None:
        """Say that this rank enters a phase: start, step, save or evaluation."""

    def mark(self, doing: str) -> None:
        """Say what this rank does next in it."""

    def notes(self) -> list[str]:
        """Return, once, what was seen of the other ranks, a line each."""


class Requests(Protocol):
    """Requests are what signals ask of this rank (zero_tp/process/signals.py)."""

    def accepting(self) -> AbstractContextManager[None]:
        """Turn signals into requests inside the block."""

    def agreed(self, device: torch.device) -> tuple[bool, bool]:
        """Return (stop, save) as any rank was asked; a save is returned once. Collective, once a step."""


class Origin(Protocol):
    """An origin is the checkpoint that a new run starts from (zero_tp/checkpoint/parent.py)."""

    def look(self, resumed: Found, run: Path, config: RunConfig, model: PretrainedConfig) -> Found:
        """Return what this rank finds of it; no checkpoint where the run itself is resumed."""

    def take(self, zero: ZeroEngine, checkpoint: Path) -> None:
        """Take its weights and moments. Collective over all ranks."""

    def told(
        self, found: Found, config: RunConfig, corpora: Mapping[str, Any], validation: dict[str, dict[str, Any]]
    ) -> list[str]:
        """Return lines on what the run keeps of it, and what it changes."""


@dataclass(frozen=True)
class Tools:
    """These are the tools of one run; each may be missing.

    Attributes:
        tasks: (engine, rows of a forward) → the figures of each zero-shot task on the model that trains, beside every
            validation (zero_tp/evaluation/live.py). Collective over all ranks.
        model: the class of the model that trains, with which such tasks may want to generate; by default that of its
            objective.
        forecast: makes the forecast of a run from its config and its device's type; called on rank 0 alone.
        profiler: makes the profiler of an engine; called on rank 0 alone.
        monitors: opens those of a run, from its config, its directory and the step it goes on from; on rank 0 alone.
        origin: what a new run starts from, in place of its seed.
        watch: of this rank.
        keep: keeps what this rank prints in the run's directory, from when that is this run's own.
    """

    tasks: Callable[[TrainingEngine, int], Mapping[str, Mapping[str, float | None]]] | None = None
    model: type[ParallelModel] | None = None
    forecast: Callable[[RunConfig, str], Forecast] | None = None
    profiler: Callable[[TrainingEngine], Profiler] | None = None
    monitors: Callable[[RunConfig, Path, int], Monitors] | None = None
    origin: Origin | None = None
    watch: Watch | None = None
    keep: Callable[[Path], None] | None = None
