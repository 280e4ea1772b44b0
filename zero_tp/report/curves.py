"""The curves of runs are drawn as one matplotlib figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zero_tp.page import dressed, new_figure
from zero_tp.report.runs import VALIDATION, Run, Series

# Paul Tol's "bright" scheme, which colour-blind people can tell apart.
COLOURS = ("#4477AA", "#EE6677", "#228833", "#AA3377", "#CCBB44", "#66CCEE", "#BBBBBB")
SPAN = 50
"""A smoothed curve follows changes of a fiftieth of what is shown."""
MOST_POINTS = 1_000
"""Of a drawn line; a longer one has the lowest and highest value of each stretch."""

Axis = Callable[[Run, int], float]


@dataclass(frozen=True)
class Line:
    """A panel shows a series in one way.

    Attributes:
        name: as in metrics.jsonl.
        label: what it is, where a panel has several.
        style: "smoothed" over the raw values, "raw", or "points" with a line through them.
        factor: of its values.
    """

    name: str
    label: str = ""
    style: str = "raw"
    factor: float = 1.0


@dataclass(frozen=True)
class Panel:
    """A panel has axes of its own; `scale` is matplotlib's name of the vertical one's."""

    title: str
    lines: tuple[Line, ...]
    scale: str = "linear"


def panels(runs: list[Run]) -> list[Panel]:
    """Return the panels of which some run has logged something."""
    found = [
        Panel("loss", (Line("loss", "training", "smoothed"), Line(f"{VALIDATION}loss", "validation", "points"))),
        Panel("learning rate", (Line("learning_rate"),)),
        Panel("gradient norm", (Line("grad_norm", style="smoothed"),), "log"),
        Panel("tokens a second", (Line("tokens_per_second", style="smoothed"),)),
        Panel(
            "utilisation of the peak [%]",
            (Line("mfu", "MFU", "smoothed", factor=100), Line("hfu", "HFU", "smoothed", factor=100)),
        ),
        Panel("peak memory of a rank [GiB]", (Line("memory_gib"),)),
        Panel("loss scale", (Line("loss_scale"),), "log"),
        Panel("skipped steps", (Line("skipped_steps"),)),
    ]
    names = dict.fromkeys(name for run in runs for name in run.series)
    drawn = {line.name for panel in found for line in panel.lines} | {f"{VALIDATION}perplexity"}  # exp of the loss
    others = [name for name in names if "/" in name or (name.startswith(VALIDATION) and name not in drawn)]
    found += [Panel(name.replace("_", " "), (Line(name, style="points"),)) for name in others]
    found += [
        Panel(name.replace("_", " "), (Line(name, style="smoothed"),))
        for name in names
        if name.endswith(("_accuracy", "_loss")) and not name.startswith(VALIDATION) and "/" not in name
    ]
    return [panel for panel in found if any(_worth_drawing(run, line) for run in runs for line in panel.lines)]


def _worth_drawing(run: Run, line: Line) -> bool:
    values = run.get(line.name).finite
    return any(values) if line.name == "skipped_steps" else bool(values)


def sheet(runs: list[Run], against: str) -> Any:
    """Draw all panels, two beside each other.

    Args:
        against: "step" or "tokens".

    Raises:
        UserError: matplotlib is not installed.
    """
    shown = panels(runs)
    rows = -(-len(shown) // 2)
    figure = new_figure(11.0, 2.9 * rows + 0.3)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    axis: Axis = _tokens if against == "tokens" else _steps
    last = max(axis(run, run.last_step) for run in runs)
    for number, panel in enumerate(shown):
        axes = dressed(figure.add_subplot(rows, 2, number + 1), panel.title)
        _draw(axes, runs, panel, axis)
        axes.set_yscale(panel.scale)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        if number >= len(shown) - 2:
            axes.set_xlabel(against, fontsize=9)
    return figure


def _steps(run: Run, step: int) -> float:
    return float(step)


def _tokens(run: Run, step: int) -> float:
    return step * float(run.tokens_per_step or math.nan)


def _draw(axes: Any, runs: list[Run], panel: Panel, axis: Axis) -> None:
    several = len(panel.lines) > 1
    for number, run in enumerate(runs):
        for turn, line in enumerate(panel.lines):
            series = run.get(line.name)
            if not series.finite:
                continue
            # One run: a colour for each line; several: one for each run, and dashes for the second line.
            colour = COLOURS[(number if len(runs) > 1 else turn) % len(COLOURS)]
            label = ", ".join(part for part in (run.name if len(runs) > 1 else "", line.label) if part)
            _draw_line(axes, run, series, line, axis, color=colour, label=label, dashed=len(runs) > 1 and turn > 0)
    if several or len(runs) > 1:
        axes.legend(fontsize=8, frameon=False)
    if panel.title == "loss":
        _leave_out_the_start(axes, runs)


def _leave_out_the_start(axes: Any, runs: list[Run]) -> None:
    """Fit the loss' axis to what follows the first tenth of the steps, where its fall from where every model begins
    would leave that less than a third of the height."""
    losses = [run.get("loss").finite for run in runs if run.get("loss").finite]
    later = [value for each in losses for value in each[len(each) // 10 :]]
    if not later:
        return
    later += [value for run in runs for value in run.get(f"{VALIDATION}loss").finite]
    low, high = min(later), max(later)
    if 3 * (high - low) < max(map(max, losses)) - low:
        room = 0.05 * (high - low) or 0.1
        axes.set_ylim(low - room, high + room)


def _draw_line(axes: Any, run: Run, series: Series, line: Line, axis: Axis, *, dashed: bool, **look: Any) -> None:
    values = [line.factor * value for value in series.values]
    if line.style == "points":
        marks = {"marker": "o", "markersize": 3.5, "linewidth": 1.2, "linestyle": "--" if dashed else "-"}
        axes.plot([axis(run, step) for step in series.steps], values, **marks, **look)
        return
    smooth = line.style == "smoothed" and len(values) > SPAN
    label = look.pop("label")
    raw = {"alpha": 0.3, "linewidth": 0.8} if smooth else {"linewidth": 1.2, "label": label}
    for drawn, how in ((values, raw), (smoothed(values), {"linewidth": 1.5, "label": label}))[: 1 + smooth]:
        places, heights = zip(*thinned(series.steps, drawn), strict=True)
        linestyle = "--" if dashed else "-"
        axes.plot([axis(run, step) for step in places], heights, linestyle=linestyle, **how, **look)


def smoothed(values: list[float]) -> list[float]:
    """Return the exponential moving average over a fiftieth of the values, unbiased at its start, over what is no nan.

    With decay d it is Σ dⁱ·x₋ᵢ / Σ dⁱ, d = 1 - 2/(n/50 + 1).
    """
    decay = 1 - 2 / (max(1.0, len(values) / SPAN) + 1)
    total = weight = 0.0
    found = []
    for value in values:
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        found.append(total / weight if weight else math.nan)
    return found


def thinned(steps: list[int], values: list[float]) -> Iterator[tuple[int, float]]:
    """Yield the points of a line; of many, the lowest and the highest of each stretch, and a gap that is in it."""
    length = -(-len(values) // (MOST_POINTS // 2))
    if length <= 2:
        yield from zip(steps, values, strict=True)
        return
    for start in range(0, len(values), length):
        stretch = range(start, min(start + length, len(values)))
        finite = [index for index in stretch if math.isfinite(values[index])]
        chosen = {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)} if finite else set()
        chosen |= set(stretch[:1]) if not finite else set()
        yield from ((steps[index], values[index]) for index in sorted(chosen))
