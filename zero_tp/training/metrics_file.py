"""metrics.jsonl has what a run measures, one strict JSON object a line, each step once and each line whole."""

from __future__ import annotations

import contextlib
import json
import math
import os
from itertools import count
from pathlib import Path

from zero_tp.files import open_regular, write_atomically
from zero_tp.strict_json import InvalidJson, parse_json
from zero_tp.training.callback import Callback, Metrics, TrainState
from zero_tp.training.output import WriteFailures

METRICS_FILE = "metrics.jsonl"


class MetricsFile(Callback):
    """Append what a run logs to RUN/metrics.jsonl, on rank 0.

    Lines of steps after the one that a run resumes from are removed first. A failed write is reported and counted; it
    does not stop training.
    """

    def on_start(self, state: TrainState) -> None:
        self._path, self._last_step = state.directory / METRICS_FILE, state.step
        self._failures, self._is_cut = WriteFailures(state.print), False
        if state.is_rank_zero:
            with self._failures.tolerate(str(self._path)):
                self._cut(state)

    def on_log(self, state: TrainState, values: Metrics) -> None:
        if state.is_rank_zero:
            with self._failures.tolerate(str(self._path)):
                self._cut(state)
                append_whole(self._path, (metrics_line(values) + "\n").encode())

    def on_end(self, state: TrainState) -> None:
        self._failures.report_totals()

    def _cut(self, state: TrainState) -> None:
        if self._is_cut:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        unreadable, aside = cut_metrics(self._path, self._last_step)
        self._is_cut = True
        if unreadable:
            where = f"; the file that has them is {aside}" if aside else ""
            lines = "lines" if unreadable > 1 else "line"
            state.print(f"{self._path}: left out {unreadable} unreadable {lines}{where}")


def metrics_line(values: Metrics) -> str:
    """Return one strict JSON object. A non-finite value is null, and `nonfinite` says which: `{"loss": "nan"}`."""
    odd = {key: str(value) for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    clean: dict[str, object] = {key: None if key in odd else value for key, value in values.items()}
    if odd:
        clean["nonfinite"] = odd
    return json.dumps(clean, allow_nan=False)


def read_line(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return (step, its other numbers by name, those that were not finite as nan); None where it is none of ours."""
    try:
        record = parse_json(line)
        step, odd = record["step"], record.get("nonfinite", {})
        numbers = {
            name: math.nan if name in odd else float(value)
            for name, value in record.items()
            if name in odd or (name != "step" and isinstance(value, int | float))
        }
    except (InvalidJson, AttributeError, KeyError, OverflowError, TypeError):  # counted, and said by the caller
        return None
    return (step, numbers) if isinstance(step, int) else None


def cut_metrics(path: Path, last_step: int) -> tuple[int, Path | None]:
    """Keep only the lines of `path` up to step `last_step`, replacing the file atomically.

    A start that resumes from step k trains k + 1, … again, and each step stands in the file once.

    Returns:
        How many lines were unreadable and left out, and where the file that had them is now: None where there is
        nothing in it but half a line at its end, which a start that was killed can leave.

    Raises:
        OSError: it can't be read, is no regular file, or the disk is full.
    """
    if not os.path.lexists(path):
        return 0, None
    kept: list[bytes] = []
    unreadable, torn, changed = 0, False, False
    with open_regular(path) as lines:
        for line in lines:
            record, whole = read_line(line), line.endswith(b"\n")
            if record is None:
                unreadable += 1
                torn = not whole
            keep = record is not None and record[0] <= last_step
            changed |= not (keep and whole)
            if keep:
                kept.append(line.removesuffix(b"\n") + b"\n")
    if not changed:
        return 0, None
    aside = None
    if unreadable > torn:
        aside = next(name for n in count(1) if not os.path.lexists(name := path.with_name(f"{path.name}.damaged-{n}")))
        path.rename(aside)
    write_atomically(path, b"".join(kept))
    return unreadable, aside


def append_whole(path: Path, line: bytes) -> None:
    """Append a line whole or not at all, as a later one begins where it ends.

    Raises:
        OSError: the disk is full or gone, or the path is no regular file.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(line):
                written += file.write(line[written:])
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(end)
            raise
