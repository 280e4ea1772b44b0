"""A run is read from its directory as it stands, also while it is written."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_tp.checkpoint.run import CONFIG
from zero_tp.config.resolve import leaves
from zero_tp.errors import UserError
from zero_tp.files import open_regular
from zero_tp.strict_json import InvalidJson, read_object
from zero_tp.training.metrics_file import METRICS_FILE, read_line

VALIDATION = "validation_"


@dataclass(frozen=True)
class Series:
    """A series has a value at some steps, ascending; one that was not finite is nan."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class Run:
    """A run is what its directory says.

    Attributes:
        name: of the directory; with its parent's where runs share one.
        series: by the names of metrics.jsonl.
        config: resolved; empty where there is none yet.
        unreadable: lines of metrics.jsonl that are no records. Half a line at its end, being written, is none of them.
    """

    name: str
    directory: Path
    series: dict[str, Series]
    config: dict[str, Any]
    unreadable: int

    def get(self, name: str) -> Series:
        """Return a series, empty where nothing of it was logged."""
        return self.series.get(name, Series())

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of a step; None where the config doesn't say."""
        length, batch = self._count("zero_tp", "data", "sequence_length"), self._count("train_batch_size")
        return None if length is None or batch is None else length * batch

    @property
    def steps(self) -> int | None:
        """Return the steps that it is to train; None where the config doesn't say."""
        return self._count("zero_tp", "training", "steps")

    def _count(self, *keys: str) -> int | None:
        value: Any = self.config
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value if type(value) is int else None

    @property
    def last_step(self) -> int:
        """Return the last step of which something was logged."""
        return max(series.steps[-1] for series in self.series.values())

    @property
    def tasks(self) -> list[str]:
        """Return the names of the evaluations' figures, `task/figure`."""
        return [name for name in self.series if "/" in name]


def read_runs(directories: list[Path]) -> list[Run]:
    """Read runs, in the order given, each with a name of its own.

    Raises:
        UserError: a directory is no run's, or is given twice.
    """
    whole = [path.resolve() for path in directories]
    for number, path in enumerate(whole):
        if path in whole[:number]:
            raise UserError(f"{directories[number]}: given twice")
    parts = 1
    while len({_name(path, parts) for path in whole}) < len(whole):
        parts += 1
    return [_read(given, _name(path, parts)) for given, path in zip(directories, whole, strict=True)]


def _name(path: Path, parts: int) -> str:
    return "/".join(path.parts[-parts:])


def _read(directory: Path, name: str) -> Run:
    path = directory / METRICS_FILE
    unreadable, by_name = 0, dict[str, dict[int, float]]()
    try:
        with open_regular(path) as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                found = read_line(line)
                if found is None:
                    unreadable += 1
                    continue
                step, values = found
                for key, value in values.items():
                    by_name.setdefault(key, {})[step] = value
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the directory of a run") from None
    try:
        config = read_object(directory / CONFIG)
    except FileNotFoundError:
        config = {}
    except (InvalidJson, OSError) as error:
        raise UserError(f"{directory / CONFIG}: not a run's config ({error})") from None
    series = {key: Series(sorted(each), [each[step] for step in sorted(each)]) for key, each in by_name.items()}
    if not series:
        raise UserError(f"{path}: nothing was logged yet; try again after the first step")
    return Run(name, directory, series, config, unreadable)


def differing(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return each key of the configs that is not the same in all runs, with its value in each."""
    flat = [{key: str(value) for key, value in leaves(run.config)} for run in runs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [(key, [each.get(key, "") for each in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
