"""A run can be given tools of other packages beside its config; the loop does not need them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from zero_tp.config import RunConfig
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


@dataclass(frozen=True)
class Tools:
    """These are the tools of one run; each may be missing.

    Attributes:
        tasks: (engine, rows of a forward) → the figures of each zero-shot task on the model that trains, beside every
            validation (zero_tp/evaluation/live.py). Collective over all ranks.
        forecast: makes the forecast of a run from its config and its device's type; called on rank 0 alone.
        profiler: makes the profiler of an engine; called on rank 0 alone.
    """

    tasks: Callable[[TrainingEngine, int], Mapping[str, Mapping[str, float | None]]] | None = None
    forecast: Callable[[RunConfig, str], Forecast] | None = None
    profiler: Callable[[TrainingEngine], Profiler] | None = None
