"""Read a run from its directory, also while it is training."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero_tp.base.errors import UserError
from zero_tp.base.files import open_regular
from zero_tp.base.settings.keys import leaves, look_up
from zero_tp.base.strict_json import InvalidJson, read_object
from zero_tp.run.checkpoint.run_directory import CONFIG
from zero_tp.run.metrics_file import METRICS_FILE, read_line

VALIDATION = "validation_"
TOKENS = "consumed_tokens"
Series = dict[int, float]
"""Step → value, ascending; nan for a value that was not finite."""


@dataclass(frozen=True)
class Run:
    """A run as its directory describes it.

    Attributes:
        name: the directory's, with its parents' if several runs have the same name.
        series: by the names of metrics.jsonl.
        config: the resolved one; empty if it is not written yet.
        unreadable: number of broken lines in metrics.jsonl, except half a line at its end, which is
            being written.
    """

    name: str
    directory: Path
    series: dict[str, Series]
    config: dict[str, Any]
    unreadable: int

    def finite(self, name: str) -> Series:
        """Return the finite values of a series, empty if nothing of this name was logged."""
        return {
            step: value for step, value in self.series.get(name, {}).items() if math.isfinite(value)
        }

    @property
    def tokens_per_step(self) -> int | None:
        """Return the tokens of each step; None if they differ, or are unknown."""
        training = look_up(self.config, "zero_tp.training")
        if look_up(training, "stages") or look_up(training, "batch_size_rampup"):
            return None
        length = self.integer("zero_tp.data.sequence_length")
        batch = self.integer("train_batch_size")
        return (length or 0) * (batch or 0) or None  # an edited config may hold 0

    @property
    def has_tokens(self) -> bool:
        """Return whether the tokens of its steps are known."""
        return bool(self.finite(TOKENS)) or self.tokens_per_step is not None

    def tokens(self, step: float) -> float:
        """Return the tokens that the run has consumed after a step; nan if they are unknown.

        A run without stages has equally many in each step. Else they are logged, and between two
        lines of the log they grow evenly.
        """
        logged = self.finite(TOKENS)
        if not logged:
            return step * float(self.tokens_per_step or math.nan)
        return float(np.interp(step, [0, *logged], [0, *logged.values()]))

    @property
    def stage_starts(self) -> dict[int, str]:
        """Return the first step of each stage after the first, and the stage's name."""
        starts: dict[int, str] = {}
        step = 1
        written = look_up(self.config, "zero_tp.training.stages")
        for stage in written if isinstance(written, list) else ():
            name, steps = (look_up(stage, key) for key in ("name", "steps"))
            if type(steps) is not int or not isinstance(name, str):
                return {}  # an edited config
            if step > 1:
                starts[step] = name
            step += steps
        return starts

    def integer(self, key: str) -> int | None:
        """Return an integer of the config; None if the key is missing or holds something else."""
        value = look_up(self.config, key)
        return value if type(value) is int else None

    @property
    def first_step(self) -> int:
        return min(map(min, self.series.values()))

    @property
    def last_step(self) -> int:
        return max(map(max, self.series.values()))


def read_runs(directories: list[Path]) -> list[Run]:
    """Read runs in the order given, each with a name of its own."""
    absolute = [path.resolve() for path in directories]
    for number, path in enumerate(absolute):
        if path in absolute[:number]:
            raise UserError(f"{directories[number]}: given twice")
    parts = 1
    # runs/a/seed1, runs/b/seed1 and runs/b/seed2:
    #
    #     1 part     seed1 seed1 seed2          2 names for 3 runs
    #     2 parts    a/seed1 b/seed1 b/seed2    3 names
    while len(names := {"/".join(path.parts[-parts:]): path for path in absolute}) < len(absolute):
        parts += 1
    # Matplotlib needs valid UTF-8.
    shown = (name.encode(errors="backslashreplace").decode() for name in names)
    return [_read(directory, name) for directory, name in zip(directories, shown, strict=True)]


def _read(directory: Path, name: str) -> Run:
    unreadable = 0
    logged = dict[str, Series]()
    path = directory / METRICS_FILE
    try:
        with open_regular(path) as lines:
            # A line without its end is being written. It can only be the last one.
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), lines):
                step, numbers = read_line(line) or (0, None)
                unreadable += numbers is None
                for key, value in (numbers or {}).items():
                    # The last line of a step counts: a resumed run trains the steps after its
                    # checkpoint again.
                    logged.setdefault(key, {})[step] = value
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); give the directory of a run"
        ) from None
    if not logged and unreadable:
        raise UserError(f"{path}: has no line of a run's metrics; give the directory of a run")
    if not logged:
        raise UserError(f"{path}: nothing was logged yet; try again after the first step")
    try:
        config = read_object(directory / CONFIG)
    except FileNotFoundError:
        config = {}
    except (InvalidJson, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{directory / CONFIG}: not a run's config ({reason})") from None
    if isinstance(config.get("comet"), dict):
        config["comet"].pop("api_key", None)  # people share reports
    # After a resume the file goes back to an earlier step.
    in_order = {key: dict(sorted(series.items())) for key, series in logged.items()}
    return Run(name, directory, in_order, config, unreadable)


def config_differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Return each key whose value is not the same in all configs, with its value in each as
    JSON.
    """
    flat = [
        {key: json.dumps(value, ensure_ascii=False) for key, value in leaves(run.config)}
        for run in runs
    ]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key, "") for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
