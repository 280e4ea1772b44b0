"""Draw the curves of runs as one matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zero_tp.base.page import PALETTE, new_figure, style_axes, values_table
from zero_tp.tools.report.runs import VALIDATION, Run

COLOURS = tuple(
    PALETTE[name] for name in ("blue", "red", "green", "purple", "yellow", "cyan", "grey")
)
DASHES = ("-", "--", ":")
LEGEND_COLUMNS = 4
MAX_RAW_CURVES = 3
"""With more runs only the averages are drawn."""
SMOOTHING = 50
"""A curve of more values than this is smoothed: it averages over a fiftieth of them."""

PANELS = {
    "loss": {"loss": "training", f"{VALIDATION}loss": "validation"},
    "learning rate": {"learning_rate": ""},
    "gradient norm": {"grad_norm": ""},
    "tokens a second": {"tokens_per_second": ""},
    "utilisation of the peak [%]": {"mfu": "MFU", "hfu": "HFU"},
    "peak memory of a rank [GiB]": {"memory_gib": ""},
    "loss scale": {"loss_scale": ""},
    "skipped steps": {"skipped_steps": ""},
    "largest attention score": {"max_attention_score": ""},
    "heads that QK-clip scales": {"clipped_heads": ""},
}
"""Title → names in metrics.jsonl and their labels in the legend."""
NOT_NOISY = ("learning_rate", "memory_gib", "loss_scale", "skipped_steps")
UPDATE_NORM = "update_norm/"
PERCENT = ("mfu", "hfu")
LOGARITHMIC = ("loss", "gradient norm", "norm of the update", "loss scale")


def panels(runs: list[Run]) -> dict[str, dict[str, str]]:
    """Return the panels that have something to show.

    PANELS come first, then evaluations, then the objective's other figures.
    """
    names = dict.fromkeys(name for run in runs for name in run.series)
    # Exp of the loss.
    drawn = {name for series in PANELS.values() for name in series} | {f"{VALIDATION}perplexity"}
    evaluations = [name for name in names if is_evaluation(name) and name not in drawn]
    others = [
        name for name in names if name.endswith(("_accuracy", "_loss")) and not is_evaluation(name)
    ]
    updates = {name: name.removeprefix(UPDATE_NORM).replace("_", " ") for name in names}
    updates = {name: label for name, label in updates.items() if name.startswith(UPDATE_NORM)}
    shown = PANELS | {"norm of the update": updates}
    shown |= {name.replace("_", " "): {name: ""} for name in (*evaluations, *others)}
    return {
        title: series
        for title, series in shown.items()
        if any(_has(run, name) for run in runs for name in series)
    }


def is_evaluation(name: str) -> bool:
    return ("/" in name and not name.startswith(("experts/", UPDATE_NORM))) or name.startswith(
        VALIDATION
    )


def _has(run: Run, name: str) -> bool:
    values = run.finite(name).values()
    return any(values) if name == "skipped_steps" else bool(values)


def equals_mfu(runs: list[Run], name: str) -> bool:
    """Return whether the name is "hfu" and it equals the MFU in all runs.

    It does if nothing was recomputed.
    """
    return name == "hfu" and all(run.finite("hfu") == run.finite("mfu") for run in runs)


def draw_runs(runs: list[Run], against: str) -> Any:
    """Draw all panels, two in a row, with one legend of the runs above them.

    If the longest run is more than five times the shortest, the horizontal axis is logarithmic.

    Args:
        against: "step" or "tokens".
    """
    shown = panels(runs)
    several = len(runs) > 1
    rows = -(-len(shown) // 2)
    figure = new_figure(11.0, 2.9 * rows + 0.3 + 0.25 * several * -(-len(runs) // LEGEND_COLUMNS))
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    ends = [_x_of(run, run.last_step, against) for run in runs]
    starts = [_x_of(run, run.first_step, against) for run in runs]
    # On a linear axis a run of a fifth of the length or less would be a short piece at the left
    # edge.
    logarithmic = max(ends) > 5 * min(ends) and min(starts) > 0
    left, right = (
        (0.9 * min(starts), 1.1 * max(ends))
        if logarithmic
        else (-0.02 * max(*ends, 1), 1.02 * max(*ends, 1))
    )
    for number, (title, labels) in enumerate(shown.items()):
        axes = style_axes(figure.add_subplot(rows, 2, number + 1), title)
        values = _draw_panel(axes, runs, against, labels)
        _mark_stages(axes, runs, against, named=number == 0)
        if title in LOGARITHMIC and max(values) > 0:
            axes.set_yscale("log")
            _label_plainly(axes.yaxis)
        if logarithmic:
            axes.set_xscale("log")
            _label_plainly(axes.xaxis)
        axes.set_xlim(left, right)
        axes.grid(axis="y", color="#000000", alpha=0.13, linewidth=0.6)
        axes.set_axisbelow(True)
        if number >= len(shown) - 2:
            axes.set_xlabel(against, fontsize=9)
    if several:
        from matplotlib.lines import Line2D

        lines = [
            Line2D([], [], label=run.name, **_line_style(number)) for number, run in enumerate(runs)
        ]
        figure.legend(
            handles=lines, loc="outside upper left", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False
        )
    return figure


def _x_of(run: Run, step: int, against: str) -> float:
    return run.tokens(step) if against == "tokens" else float(step)


def _mark_stages(axes: Any, runs: list[Run], against: str, *, named: bool) -> None:
    """Draw a line where a stage of a run has begun, with its name in the first panel."""
    for number, run in enumerate(runs):
        colour = _line_style(number)["color"] if len(runs) > 1 else "#000000"
        for step, name in run.stage_starts.items():
            if step > run.last_step:
                continue
            # Between the last step before and the first of the stage.
            x = _x_of(run, step - 1, against)
            axes.axvline(x, color=colour, alpha=0.45, linewidth=0.8, linestyle=":")
            if named and len(runs) == 1:
                axes.annotate(
                    f" {name}",
                    (x, 1.0),
                    xycoords=("data", "axes fraction"),
                    va="top",
                    fontsize=7,
                    parse_math=False,
                )


def _label_plainly(axis: Any) -> None:
    """Label a logarithmic axis with 6.25 instead of 6.25 × 10⁰."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter())


def _line_style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a run or series, other than those of its neighbours."""
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


@dataclass(frozen=True)
class Curve:
    """The values of one series of a run, as a panel shows them.

    Attributes:
        run: the number of the run. index: the number of the series in its panel.
        name: in metrics.jsonl. label: in the panel's legend, "" for the only series.
        steps, values: what was logged.
        line: the values, or their average where they are noisy.
    """

    run: int
    index: int
    name: str
    label: str
    steps: list[int]
    values: list[float]
    line: list[float]

    @property
    def is_smoothed(self) -> bool:
        return self.line is not self.values


def _curves(runs: list[Run], labels: dict[str, str]) -> Iterator[Curve]:
    """Yield the curves of a panel, run by run."""
    # Two curves on top of each other would look like one with a wrong label.
    labels = {name: label for name, label in labels.items() if not equals_mfu(runs, name)}
    for number, run in enumerate(runs):
        for index, (name, label) in enumerate(labels.items()):
            if not run.finite(name):
                continue
            factor = 100 if name in PERCENT else 1
            values = [factor * value for value in run.series[name].values()]
            is_noisy = not is_evaluation(name) and name not in NOT_NOISY and len(values) > SMOOTHING
            # The same object if not smoothed: `is_smoothed` compares identities.
            line = smoothed(values) if is_noisy else values
            yield Curve(number, index, name, label, list(run.series[name]), values, line)


def _draw_panel(axes: Any, runs: list[Run], against: str, labels: dict[str, str]) -> list[float]:
    """Draw the curves of a panel and return all finite values.

    Of one run each series has a colour, of several runs each run.

    Evaluations are joined points. A noisy series is drawn as its average over its pale raw values.
    """
    several = len(runs) > 1
    finite = list[float]()
    for curve in _curves(runs, labels):
        style = _line_style(curve.run if several else curve.index)
        # With several runs the colour names the run, so a panel's second series needs another line.
        if several and curve.index:
            style |= {"linestyle": "-."}
        xs = [_x_of(runs[curve.run], step, against) for step in curve.steps]
        finite += filter(math.isfinite, curve.values)
        if curve.is_smoothed and len(runs) <= MAX_RAW_CURVES:
            axes.plot(xs, curve.values, alpha=0.3, linewidth=0.8, **style)
        (line,) = axes.plot(xs, curve.line, linewidth=1.5 if curve.is_smoothed else 1.2, **style)
        if is_evaluation(curve.name):
            line.set(marker="o", markersize=3.5)
        if curve.label not in axes.get_legend_handles_labels()[1]:
            line.set_label(curve.label)
    if any(labels.values()):
        axes.legend(fontsize=8, frameon=False)
    return finite


def value_tables(runs: list[Run]) -> Iterator[str]:
    """Yield the values behind each curve of `draw_runs` as an HTML table that opens on a click."""
    for title, labels in panels(runs).items():
        for curve in _curves(runs, labels):
            run = runs[curve.run].name if len(runs) > 1 else ""
            name = ", ".join(part for part in (title, curve.label, run) if part)
            points = zip(curve.steps, curve.values, curve.line, strict=True)
            rows = [
                (f"{step:,}", f"{value:.6g}", f"{average:.6g}")
                for step, value, average in points
                if math.isfinite(value)
            ]
            if curve.is_smoothed:
                yield values_table(name, ("step", "value", "average"), rows)
            else:
                yield values_table(name, ("step", "value"), [row[:2] for row in rows])


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average over a fiftieth of the values.

    It is unbiased at its start, and skips nan.

    With decay d it is Σ dⁱ·x₋ᵢ / Σ dⁱ, d = 1 - 2/(n/50 + 1).
    """
    # n = 500: a span of 10 values and d = 1 - 2/11 = 0.82. An average that starts at 0 is too small
    # at first; dividing by the weights so far corrects that.
    decay = 1 - 2 / (max(1.0, len(values) / SMOOTHING) + 1)
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total = decay * total + value
            weight = decay * weight + 1
        averages.append(total / weight if weight else math.nan)
    return averages
