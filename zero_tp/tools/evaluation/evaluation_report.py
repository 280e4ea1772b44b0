"""The report of an evaluation: tables for a terminal, and files of samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from zero_tp.base.files import write_named
from zero_tp.base.page import text_table


def _figure(value: float | None) -> str:
    return (
        "not finite" if value is None else f"{value:,.4g}" if abs(value) >= 1e6 else f"{value:,.3f}"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}%"


_count = "{:,}".format
_rate = "{:,.0f}".format

# Column, key of the result, format.
COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("accuracy", "accuracy", _percent),
    ("±", "accuracy_standard_error", _percent),
    ("perplexity", "perplexity", _figure),
    ("by T_o - 1", "perplexity_released_code", _figure),
    ("sub-word", "perplexity_subword", _figure),
    ("nats/token", "loss", _figure),
    ("bits/byte", "bits_per_byte", _figure),
    ("T_o", "original_tokens", _count),
    ("documents", "documents", _count),
    ("examples", "examples", _count),
    ("truncated", "truncated", _count),
    ("tokens", "tokens", _count),
    ("computed", "tokens_computed", _count),
    ("tokens/s", "tokens_per_second", _rate),
    ("computed/s", "tokens_computed_per_second", _rate),
    ("seconds", "seconds", _figure),
)


# lm-eval formats its tasks' metrics; our table adds the columns from "truncated" on.
LM_EVAL_COLUMNS = COLUMNS[-6:]


def table(report: Mapping[str, Any]) -> str:
    """Return a table for each of zero_tp's own tasks, then lm-eval's table."""
    parts: list[str] = [note] if (note := report["model"].get("note")) else []
    harness: dict[str, dict[str, Any]] = {}
    rows: list[tuple[str, ...]] = []
    for task, result in report["tasks"].items():
        candidates = LM_EVAL_COLUMNS if "lm_eval" in result else COLUMNS
        columns = [
            (name, format_cell(result[key]))
            for name, key, format_cell in candidates
            if key in result
        ]
        lines = [("task", *(name for name, _ in columns)), (task, *(cell for _, cell in columns))]
        if "lm_eval" in result:
            rows += lines[1:] if rows else lines
            for key, value in result["lm_eval"].items():
                # One table for all of lm-eval's tasks: its `make_table` takes the results of one
                # evaluation, and each task here is one.
                harness.setdefault(key, {}).update(value)
        else:
            parts.append("\n".join(text_table(lines)))
    if harness:
        from lm_eval.utils import make_table

        parts.append(make_table(harness).rstrip())
        if harness.get("groups"):
            parts.append(make_table(harness, "groups").rstrip())
        parts.append("\n".join(text_table(rows)))
    return "\n\n".join(parts)


def write_samples(path: Path, report: dict[str, Any]) -> list[Path]:
    """Move the samples out of a report into files next to `path`.

    Each task has a file of JSON lines in lm-eval's format.
    """
    written = []
    for result in report["tasks"].values():
        for task, samples in result.pop("samples", {}).items():
            # Quoted, because a task file may name a task `../mine`.
            file = path.with_name(f"{path.stem}_samples_{quote(task, safe='')}.jsonl")
            write_named(file, "".join(json.dumps(sample) + "\n" for sample in samples))
            written.append(file)
    return written
