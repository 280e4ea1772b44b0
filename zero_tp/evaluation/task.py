"""This module says what a task of zero-shot evaluation is, and what it is asked with."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from zero_tp.errors import UserError
from zero_tp.evaluation.subject import Subject

LEAST = {"batch_size": 1, "limit": 1, "overlap": 1, "num_fewshot": 0}


@dataclass(frozen=True)
class TaskOptions:
    """The options hold what tasks are asked with.

    Attributes:
        text_key: key of the text in JSON lines.
        overlap: tokens a window advances by; None: the task's own.
        limit: examples (documents) of a task; None: all.
        num_fewshot: of lm-eval's tasks; None: what the task says.
        include_path: a directory of lm-eval task files.
    """

    text_key: str = "text"
    overlap: int | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    include_path: Path | None = None

    def check(self) -> None:
        """Raise a UserError for a number that can't be."""
        for name, least in LEAST.items():
            value = getattr(self, name, None)
            if value is not None and value < least:
                raise UserError(f"--{name.replace('_', '-')} {value}: at least {least}")


class Task(ABC):
    """A task is one of `--tasks`. To make one reads and checks its data; the model isn't needed for that.

    Attributes:
        name: as it was asked for.
        logged: the figures that a training run logs.
    """

    name: str
    logged: ClassVar[tuple[str, ...]] = ()

    def check(self, positions: int) -> None:  # noqa: B027  # most tasks fit every model
        """Raise a UserError if what was asked doesn't fit a model that reads so many tokens."""

    @abstractmethod
    def run(self, subject: Subject) -> dict[str, Any]:
        """Return the figures, for JSON. Collective; all ranks get the same.

        Every task gives `data` (its origin and SHA-256), `tokens`, those scored, and `tokens_computed`, those that the
        model read, padding not counted.
        """

    def figures_to_log(self, result: Mapping[str, Any]) -> dict[str, float | None]:
        """Pick what a training run logs of a result."""
        return {name: result[name] for name in self.logged}


def as_json(value: Any) -> Any:
    """Return the value as JSON has it: None for a number that isn't finite, its text for what JSON has no form for."""
    if isinstance(value, dict):
        return {str(key): as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [as_json(each) for each in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)
