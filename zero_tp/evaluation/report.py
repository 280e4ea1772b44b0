"""What an evaluation shows: tables, the JSON file, and two of those side by side."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_tp.errors import UserError

# Column → key of the result and its format. A task of zero_tp's own has the columns whose keys it has.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("accuracy", "accuracy", "percent"),
    ("±", "accuracy_standard_error", "percent"),
    ("perplexity", "perplexity", "figure"),
    ("by T_o - 1", "perplexity_released_code", "figure"),
    ("sub-word", "perplexity_subword", "figure"),
    ("nats/token", "loss", "figure"),
    ("bits/byte", "bits_per_byte", "figure"),
    ("T_o", "original_tokens", "count"),
    ("documents", "documents", "count"),
    ("examples", "examples", "count"),
    ("truncated", "truncated", "count"),
    ("tokens", "tokens", "count"),
    ("computed", "tokens_computed", "count"),
    ("tokens/s", "tokens_per_second", "rate"),
    ("computed/s", "tokens_computed_per_second", "rate"),
    ("seconds", "seconds", "figure"),
)


def _figure(value: float | None) -> str:
    return "overflow" if value is None else f"{value:,.4g}" if abs(value) >= 1e6 else f"{value:,.3f}"


FORMATS: dict[str, Callable[[Any], str]] = {
    "figure": _figure,
    "percent": lambda value: "-" if value is None else f"{100 * value:.2f}%",
    "count": lambda value: f"{value:,}",
    "rate": lambda value: f"{value:,.0f}",
}


def table(report: Mapping[str, Any]) -> str:
    """The results for a person: a heading and a line for each of zero_tp's own tasks, then lm-eval's table."""
    parts = []
    for task, result in report["tasks"].items():
        shown = [(name, FORMATS[kind](result[key])) for name, key, kind in COLUMNS if key in result]
        if "lm_eval" not in result:
            parts.append(_aligned([("task", *(name for name, _ in shown)), (task, *(cell for _, cell in shown))]))
    if harness := [result["lm_eval"] for result in report["tasks"].values() if "lm_eval" in result]:
        parts.append(_harness_table(harness))
        rates = [
            (task, *(FORMATS[kind](result[key]) for _, key, kind in COLUMNS[-6:]))
            for task, result in report["tasks"].items()
            if "lm_eval" in result
        ]
        parts.append(_aligned([("task", *(name for name, _, _ in COLUMNS[-6:])), *rates]))
    return "\n\n".join(parts)


def _harness_table(results: Sequence[Mapping[str, Any]]) -> str:
    """lm-eval's own table of several results."""
    from lm_eval.utils import make_table

    whole: dict[str, dict[str, Any]] = {}
    for result in results:
        for key, value in result.items():
            whole.setdefault(key, {}).update(value)
    made = make_table(whole).rstrip()
    return made + "\n\n" + make_table(whole, "groups").rstrip() if whole.get("groups") else str(made)


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns under each other, the first `left` of them flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write JSON, whole or not at all. UserError when it can't be written."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: can't be written: {error.strerror or error}") from error


def read_report(path: Path) -> dict[str, Any]:
    """A file that `write_report` wrote. UserError: it isn't one."""
    try:
        report: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})") from error
    if not isinstance(report, dict) or not isinstance(report.get("tasks"), dict) or "model" not in report:
        raise UserError(f"{path}: not a report of eval/zero_shot.py --output")
    return report


def comparison(first: Path, second: Path) -> str:
    """Two reports side by side: every figure of the tasks that both have, and what else differs.

    UserError: one can't be read, or they have no task in common.
    """
    a, b = read_report(first), read_report(second)
    common = [task for task in a["tasks"] if task in b["tasks"]]
    if not common:
        raise UserError(
            f"{first} and {second} have no task in common: {', '.join(a['tasks'])}; {', '.join(b['tasks'])}"
        )
    rows = [("task", "figure", str(first), str(second), "difference")]
    for task in common:
        others = dict(_numbers(b["tasks"][task]))
        for key, value in _numbers(a["tasks"][task]):
            if key in others:
                rows.append((task, key, _number(value), _number(others[key]), _number(others[key] - value)))
    lines = _aligned(rows, left=2).splitlines()
    return "\n".join([*lines, "", *_differences(a, b, common)])


def _numbers(result: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in {**result, **result.get("metrics", {})}.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], common: Sequence[str]) -> Iterator[str]:
    for task in common:
        if _hashes(a["tasks"][task].get("data")) != _hashes(b["tasks"][task].get("data")):
            yield f"{task}: not the same data"
    for side, tasks in ((a, b), (b, a)):
        if missing := [task for task in side["tasks"] if task not in tasks["tasks"]]:
            yield f"only in {'the first' if side is a else 'the second'}: {', '.join(missing)}"
    for part in ("model", "settings", "versions"):
        for key in sorted(a.get(part, {}).keys() | b.get(part, {}).keys()):
            values = [side.get(part, {}).get(key) for side in (a, b)]
            if values[0] != values[1]:
                yield f"{part}.{key}: {values[0]} → {values[1]}"


def _hashes(data: Any) -> Any:
    """The SHA-256 of a task's data, or of its subtasks' by name."""
    if not isinstance(data, Mapping):
        return None
    return data.get("sha256") or {name: _hashes(each) for name, each in data.items()}
