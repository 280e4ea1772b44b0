"""Draw the curves of runs as one matplotlib figure."""

from __future__ import annotations

import math
from typing import Any

from zero_tp.base.page import PALETTE, new_figure, scale, show_values, style_axes
from zero_tp.tools.report.runs import VALIDATION, Run

COLOURS = tuple(PALETTE[name] for name in ("blue", "red", "green", "purple", "yellow", "cyan", "grey"))
DASHES, LEGEND_COLUMNS = ("-", "--", ":"), 4
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
}
"""Title → names in metrics.jsonl and their labels in the legend."""
NOT_NOISY = ("learning_rate", "memory_gib", "loss_scale", "skipped_steps")
PERCENT = ("mfu", "hfu")
LOGARITHMIC = ("loss", "gradient norm", "loss scale")


def panels(runs: list[Run]) -> dict[str, dict[str, str]]:
    """Return the panels that have something to show: PANELS, then evaluations, then the objective's other figures."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    drawn = {name for series in PANELS.values() for name in series} | {f"{VALIDATION}perplexity"}  # exp of the loss
    evaluations = [name for name in names if is_evaluation(name) and name not in drawn]
    others = [name for name in names if name.endswith(("_accuracy", "_loss")) and not is_evaluation(name)]
    shown = PANELS | {name.replace("_", " "): {name: ""} for name in (*evaluations, *others)}
    return {title: series for title, series in shown.items() if any(_has(run, name) for run in runs for name in series)}


def is_evaluation(name: str) -> bool:
    return ("/" in name and not name.startswith("experts/")) or name.startswith(VALIDATION)


def _has(run: Run, name: str) -> bool:
    values = run.finite(name).values()
    return any(values) if name == "skipped_steps" else bool(values)


def equals_mfu(runs: list[Run], name: str) -> bool:
    """Return whether the name is "hfu", and it equals the MFU in all runs because nothing was recomputed."""
    return name == "hfu" and all(run.finite("hfu") == run.finite("mfu") for run in runs)


def draw_runs(runs: list[Run], against: str) -> Any:
    """Draw all panels, two in a row, with one legend of the runs above them.

    If the longest run is more than five times the shortest, the horizontal axis is logarithmic.

    Args:
        against: "step" or "tokens".
    """
    shown, several = panels(runs), len(runs) > 1
    rows = -(-len(shown) // 2)
    figure = new_figure(11.0, 2.9 * rows + 0.3 + 0.25 * several * -(-len(runs) // LEGEND_COLUMNS))
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    x_scales = [float(run.tokens_per_step or math.nan) if against == "tokens" else 1.0 for run in runs]
    ends = [run.last_step * x_scale for run, x_scale in zip(runs, x_scales, strict=True)]
    starts = [run.first_step * x_scale for run, x_scale in zip(runs, x_scales, strict=True)]
    logarithmic = max(ends) > 5 * min(ends) and min(starts) > 0
    left, right = (0.9 * min(starts), 1.1 * max(ends)) if logarithmic else (-0.02 * max(*ends, 1), 1.02 * max(*ends, 1))
    for number, (title, labels) in enumerate(shown.items()):
        axes = style_axes(figure.add_subplot(rows, 2, number + 1), title)
        values = _draw_panel(axes, runs, x_scales, labels)
        scale(axes, "y", values, logarithmic=title in LOGARITHMIC and max(values) > 0)
        scale(axes, "x", [*starts, *ends], logarithmic=logarithmic)
        axes.set_xlim(left, right)
        axes.grid(axis="y", color="#000000", alpha=0.13, linewidth=0.6)
        axes.set_axisbelow(True)
        if number >= len(shown) - 2:
            axes.set_xlabel(against, fontsize=9)
    if several:
        from matplotlib.lines import Line2D

        lines = [Line2D([], [], label=run.name, **_line_style(number)) for number, run in enumerate(runs)]
        figure.legend(handles=lines, loc="outside upper left", ncols=LEGEND_COLUMNS, fontsize=8, frameon=False)
    return figure


def _line_style(number: int) -> dict[str, Any]:
    """Return the colour and dashes of a run or series, other than those of its neighbours."""
    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": dashes}


def _draw_panel(axes: Any, runs: list[Run], x_scales: list[float], labels: dict[str, str]) -> list[float]:
    """Draw one run with a colour for each series, or several runs with a colour for each; return all finite values.

    Evaluations are joined points. A noisy series is drawn as its average over its pale raw values.
    """
    labels = {name: label for name, label in labels.items() if not equals_mfu(runs, name)}
    several, finite = len(runs) > 1, list[float]()
    for number, (run, x_scale) in enumerate(zip(runs, x_scales, strict=True)):
        for index, (name, label) in enumerate(labels.items()):
            if not run.finite(name):
                continue
            style = _line_style(number if several else index) | ({"linestyle": "-."} if several and index else {})
            xs = [x_scale * step for step in run.series[name]]
            curve = values = [(100 if name in PERCENT else 1) * value for value in run.series[name].values()]
            finite += filter(math.isfinite, values)
            if not is_evaluation(name) and name not in NOT_NOISY and len(values) > SMOOTHING:
                if len(runs) <= MAX_RAW_CURVES:
                    axes.plot(xs, values, alpha=0.3, linewidth=0.8, **style)
                curve = smoothed(values)
            (line,) = axes.plot(xs, curve, linewidth=1.2 if curve is values else 1.5, **style)
            if is_evaluation(name):
                line.set(marker="o", markersize=3.5)
            if label not in axes.get_legend_handles_labels()[1]:
                line.set_label(label)
            series = ", ".join(part for part in (run.name if several else "", label) if part)
            texts = [
                (x_scale * step, height, f"{series}: {value:.6g} at step {step:,}".removeprefix(": "))
                for step, value, height in zip(run.series[name], values, curve, strict=True)
                if math.isfinite(value)
            ]
            show_values(axes, texts)
    if len(labels) > 1 or "mfu" in labels:
        axes.legend(fontsize=8, frameon=False)
    return finite


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average over a fiftieth of the values, unbiased at its start; nan is skipped.

    With decay d it is Σ dⁱ·x₋ᵢ / Σ dⁱ, d = 1 - 2/(n/50 + 1).
    """
    decay = 1 - 2 / (max(1.0, len(values) / SMOOTHING) + 1)
    total = weight = 0.0
    averages = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight if weight else math.nan)
    return averages
