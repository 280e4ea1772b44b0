"""A run's tools come from other packages: they forecast, profile, watch, and evaluate tasks beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from zero_tp.config import RunConfig
from zero_tp.models.model import ParallelModel
from zero_tp.training.engine import TrainingEngine


class Forecast(Protocol):
    """A forecast says what a run will take, and at its end what it took (zero_tp/planning/forecast.py)."""

    def announcement(self) -> str:
        """Return a line for the run's start."""

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

    def begin(self, limits: Mapping[str, float | None], rank: int, world: int) -> None:
        """Start to watch, with each phase's limit [seconds]."""

    def connect(self) -> None:
        """Begin to tell the other ranks."""

    def leave(self) -> None:
        """Watch no more."""

    def enter(self, phase: str, step: int = 0) -> None:
        """Say that this rank enters a phase: start, step, save or evaluation."""

    def mark(self, doing: str) -> None:
        """Say what this rank does next in it."""

    def notes(self) -> list[str]:
        """Return, once, what was seen of the other ranks, a line each."""


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
        watch: of this rank.
    """

    tasks: Callable[[TrainingEngine, int], Mapping[str, Mapping[str, float | None]]] | None = None
    model: type[ParallelModel] | None = None
    forecast: Callable[[RunConfig, str], Forecast] | None = None
    profiler: Callable[[TrainingEngine], Profiler] | None = None
    watch: Watch | None = None
