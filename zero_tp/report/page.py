"""The report of runs is a page: their curves, their figures, and what sets them apart."""

from __future__ import annotations

import html
import json
import statistics
from pathlib import Path

from zero_tp import page
from zero_tp.checkpoint.run import CONFIG
from zero_tp.errors import UserError
from zero_tp.report.curves import sheet
from zero_tp.report.runs import VALIDATION, Run, Series, differing, read_runs
from zero_tp.training.metrics_file import METRICS_FILE


def write_report(directories: list[Path], to: Path | None = None, against: str | None = None) -> list[Path]:
    """Write the report of runs, which may be going on.

    Args:
        to: the page; by default report.html in the run's directory, or of several runs where the command is.
        against: what the curves lie over; by default tokens where the runs' steps have different ones, else steps.

    Returns:
        The files written: the page, then a PNG of its curves.

    Raises:
        UserError: a directory is no run's, nothing was logged yet, matplotlib is missing, or a file can't be written.
    """
    runs = read_runs(directories)
    sizes = {run.tokens_per_step for run in runs}
    if against == "tokens" and None in sizes:
        without = next(run for run in runs if run.tokens_per_step is None)
        raise UserError(f"{without.directory / CONFIG}: says no tokens of a step; draw against step")
    chosen = against or ("tokens" if len(sizes) > 1 and None not in sizes else "step")
    to = to or (runs[0].directory if len(runs) == 1 else Path()) / "report.html"
    figure = sheet(runs, chosen)
    parts = [page.svg(figure), "<h2>Figures</h2>", _figures(runs)]
    parts += [f"<p>{html.escape(note)}</p>" for note in _notes(runs)]
    if len(runs) > 1:
        rows = [(key, *values) for key, values in differing(runs)]
        parts.append("<h2>What differs between their configs</h2>")
        parts.append(page.table(("", *(run.name for run in runs)), rows, "keys") if rows else "<p>Nothing.</p>")
    for run in runs:
        shown = html.escape(json.dumps(run.config, indent=2, ensure_ascii=False))
        parts.append(f"<details><summary>{html.escape(run.name)}/{CONFIG}</summary><pre>{shown}</pre></details>")
    return page.write(to, ", ".join(run.name for run in runs), parts, {"curves": figure})


def _notes(runs: list[Run]) -> list[str]:
    return [
        f"{run.directory / METRICS_FILE}: {run.unreadable} unreadable line{'s' if run.unreadable > 1 else ''} left out"
        for run in runs
        if run.unreadable
    ]


def _figures(runs: list[Run]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("step", [f"{run.last_step:,}{_of(run)}" for run in runs]),
        ("tokens", ["" if (size := run.tokens_per_step) is None else f"{run.last_step * size:,}" for run in runs]),
        ("training loss, mean of the last 50 lines", [_mean(run.get("loss"), "{:.4f}", last=50) for run in runs]),
        ("validation loss, last", [_last(run.get(f"{VALIDATION}loss"), "{:.4f}") for run in runs]),
        ("validation loss, best", [_best(run.get(f"{VALIDATION}loss")) for run in runs]),
        *((name, [_last(run.get(name), "{:.4g}") for run in runs]) for name in _task_names(runs)),
        ("tokens a second, median", [_median(run.get("tokens_per_second"), "{:,.0f}") for run in runs]),
        ("MFU, median", [_median(run.get("mfu"), "{:.1%}") for run in runs]),
        ("HFU, median", [_median(run.get("hfu"), "{:.1%}") for run in runs]),
        ("peak memory of a rank [GiB]", [_last(run.get("memory_gib"), "{:.2f}") for run in runs]),
        ("skipped steps", [_last(run.get("skipped_steps"), "{:.0f}") for run in runs]),
    ]
    shown = [(name, *cells) for name, cells in rows if any(cells)]
    return page.table(("", *(run.name for run in runs)), shown, "keys")


def _task_names(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(name for run in runs for name in run.tasks))


def _of(run: Run) -> str:
    return "" if run.steps is None else f" of {run.steps:,}"


def _last(series: Series, form: str) -> str:
    return form.format(series.finite[-1]) if series.finite else ""


def _mean(series: Series, form: str, *, last: int) -> str:
    return form.format(statistics.fmean(series.finite[-last:])) if series.finite else ""


def _median(series: Series, form: str) -> str:
    return form.format(statistics.median(series.finite)) if series.finite else ""


def _best(series: Series) -> str:
    if not series.finite:
        return ""
    least = min(series.finite)
    return f"{least:.4f} at step {series.steps[series.values.index(least)]:,}"
