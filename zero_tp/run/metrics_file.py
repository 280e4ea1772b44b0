"""metrics.jsonl: a run's measurements, one strict JSON object a line, each step once."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from zero_tp.base.files import open_regular, write_atomically
from zero_tp.base.strict_json import InvalidJson, parse_json
from zero_tp.run.callback import Callback, Metrics, TrainState

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Callback):
    """Append each logged line to RUN/metrics.jsonl, on rank 0.

    Lines of steps after the one that a run resumes from are removed first.
    """

    def on_start(self, state: TrainState) -> None:
        self._path = state.directory / METRICS_FILE
        self._first_step = state.step
        self._is_cut = False
        self._write(state, None)

    def on_log(self, state: TrainState, values: Metrics) -> None:
        self._write(state, values)

    def _write(self, state: TrainState, values: Metrics | None) -> None:
        if not state.is_rank_zero:
            return
        with state.tolerate_failed_write(str(self._path)):
            if not self._is_cut:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                # At the first write that works: if the disk was full at the start, old lines would
                # stay and steps would be there twice.
                unreadable = cut_metrics(self._path, self._first_step)
                self._is_cut = True
                if unreadable:
                    lines = "lines" if unreadable > 1 else "line"
                    state.print(f"{self._path}: removed {unreadable} unreadable {lines}")
            if values is not None:
                append_line(self._path, (metrics_line(values) + "\n").encode())


def metrics_line(values: Metrics) -> str:
    """Return one strict JSON object.

    A non-finite value is null, and `nonfinite` says which: `{"loss": "nan"}`.
    """
    nonfinite = {
        name: str(value)
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    line: dict[str, object] = {
        name: None if name in nonfinite else value for name, value in values.items()
    }
    return json.dumps(line | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False)


def read_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return (step, its other numbers by name) of a line; None if it is no record.

    Non-finite numbers are nan.
    """
    try:
        record = parse_json(line)
        step = record["step"]
        nonfinite = record.get("nonfinite", {})
        numbers = {
            name: math.nan if name in nonfinite else float(value)
            for name, value in record.items()
            if name in nonfinite or (name != "step" and isinstance(value, int | float))
        }
    except (
        InvalidJson,
        AttributeError,
        KeyError,
        OverflowError,
        TypeError,
    ):  # the caller counts and reports it
        return None
    return (step, numbers) if isinstance(step, int) else None


def cut_metrics(path: Path, last_step: int) -> int:
    """Remove the lines of steps after `last_step`, and unreadable ones.

    Returns how many were unreadable.

    A run that resumes from step k trains k + 1, … again, and the file holds each step once. A
    killed run can leave half a line.
    """
    if not os.path.lexists(path):
        return 0
    with open_regular(path) as file:
        lines = list(file)
    records = [read_line(line) for line in lines]
    remaining = [
        line.removesuffix(b"\n") + b"\n"
        for line, record in zip(lines, records, strict=True)
        if record is not None and record[0] <= last_step
    ]
    # An unchanged file is not replaced: somebody may be following it with `tail -f`.
    if remaining != lines:
        write_atomically(path, b"".join(remaining))
    return records.count(None)


def append_line(path: Path, line: bytes) -> None:
    """Append a line whole or not at all, because the next one begins where it ends."""
    with path.open("ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            # A write may be short, for example on a full disk; the next call then raises.
            while line:
                line = line[file.write(line) :]
        except OSError:
            file.truncate(end)
            raise
