"""Write the report of runs as a page.

It has curves with their values, key numbers, and differences between configs.
"""

from __future__ import annotations

import html
import json
import statistics
from collections.abc import Callable
from pathlib import Path

from zero_tp.base import page
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.run_directory import CONFIG
from zero_tp.run.metrics_file import METRICS_FILE
from zero_tp.tools.report.curves import draw_runs, equals_mfu, is_evaluation, value_tables
from zero_tp.tools.report.runs import VALIDATION, Run, Series, config_differences, read_runs

STEPS = "zero_tp.training.steps"


def write_report(
    directories: list[Path], to: Path | None = None, against: str | None = None
) -> list[Path]:
    """Write the report of runs, which may still be training.

    Args:
        to: the page; by default report.html in the run's directory, or in the working directory for
            several runs.
        against: the horizontal axis, "step" or "tokens"; by default "tokens" if the runs differ in
            tokens per step.

    Returns:
        The files written: the page, then a PNG of its curves.

    Raises:
        UserError: a directory is not a run's, nothing was logged, matplotlib is missing, or a file
            can't be written.
    """
    runs = read_runs(directories)
    # Runs with other batches see another number of tokens in a step; against steps the larger batch
    # would look better than it is.
    sizes = {run.tokens_per_step for run in runs}
    without = next((run for run in runs if not run.has_tokens), None)
    if against == "tokens" and without is not None:
        raise UserError(
            f"{without.directory / CONFIG}: has no batch size or sequence length; draw against step"
        )
    # None: the steps of one run are not alike.
    differ = len(runs) > 1 and (len(sizes) > 1 or None in sizes)
    figure = draw_runs(runs, against or ("tokens" if differ and without is None else "step"))
    names = ["", *(run.name for run in runs)]
    parts = [
        page.svg(figure),
        "<h2>Key numbers</h2>",
        page.table(names, _key_numbers(runs), "keys"),
    ]
    for run in runs:
        if run.unreadable:
            path = html.escape(str(run.directory / METRICS_FILE))
            parts.append(f"<p>{path}: {run.unreadable} broken lines left out</p>")
    if len(runs) > 1:
        rows = [(key, *values) for key, values in config_differences(runs)]
        parts.append("<h2>Differences between the configs</h2>")
        parts.append(page.table(names, rows, "keys") if rows else "<p>None.</p>")
    parts += ["<h2>Values</h2>", *value_tables(runs)]
    for run in runs:
        config = html.escape(json.dumps(run.config, indent=2, ensure_ascii=False))
        parts.append(
            f"<details><summary>{html.escape(run.name)}/{CONFIG}</summary><pre>{config}</pre></details>"
        )
    to = to or (runs[0].directory if len(runs) == 1 else Path()) / "report.html"
    return page.write(to, ", ".join(names[1:]), parts, {"curves": figure})


def _key_numbers(runs: list[Run]) -> list[tuple[str, ...]]:
    """Return the rows of the table of key numbers, without those that no run has."""

    def row(label: str, name: str, summary: Callable[[Series], str]) -> tuple[str, ...]:
        return (label, *(summary(series) if (series := run.finite(name)) else "" for run in runs))

    steps = [
        f"{run.last_step:,}" + (f" of {end:,}" if (end := run.integer(STEPS)) else "")
        for run in runs
    ]
    tasks = dict.fromkeys(
        name for run in runs for name in run.series if "/" in name and is_evaluation(name)
    )
    rows: list[tuple[str, ...]] = [
        ("step", *steps),
        (
            "tokens",
            *(f"{run.tokens(run.last_step):,.0f}" if run.has_tokens else "" for run in runs),
        ),
        row("training loss, mean of the last 50 lines", "loss", _mean_of_last_50),
        row("validation loss, last", f"{VALIDATION}loss", _last("{:.4f}")),
        row("validation loss, best", f"{VALIDATION}loss", _best),
        *(row(name, name, _last("{:.4g}")) for name in tasks),
        row("tokens a second, median", "tokens_per_second", _median("{:,.0f}")),
        row("MFU, median", "mfu", _median("{:.1%}")),
        () if equals_mfu(runs, "hfu") else row("HFU, median", "hfu", _median("{:.1%}")),
        row("peak memory of a rank [GiB]", "memory_gib", _last("{:.2f}")),
        row("skipped steps", "skipped_steps", _last("{:.0f}")),
    ]
    return [cells for cells in rows if any(cells[1:])]


def _last(form: str) -> Callable[[Series], str]:
    return lambda series: form.format([*series.values()][-1])


def _median(form: str) -> Callable[[Series], str]:
    return lambda series: form.format(statistics.median(series.values()))


def _mean_of_last_50(series: Series) -> str:
    return f"{statistics.fmean([*series.values()][-50:]):.4f}"


def _best(series: Series) -> str:
    step = min(series, key=series.__getitem__)
    return f"{series[step]:.4f} at step {step:,}"
