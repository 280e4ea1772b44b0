"""Draw memory over a step with matplotlib, and write the plan as a page with this picture."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_tp import page
from zero_tp.constants import GIB
from zero_tp.page import PALETTE, legend, new_figure, style_axes
from zero_tp.planning import report
from zero_tp.planning.memory import CATEGORIES, Point
from zero_tp.planning.plan import Plan
from zero_tp.planning.report import TITLES

COLOURS = {
    name: PALETTE[colour]
    for name, colour in zip(CATEGORIES, ("blue", "cyan", "green", "yellow", "grey", "red", "purple"), strict=True)
}
PHASES = ("forward", "backward", "optimizer")
SHOWN_POINTS = 600
AFTER_BACKWARD = 4
"""The last points of a step, after those of its last micro-batch (`RankMemory.points`)."""


def write_page(plan: Plan, path: Path, advice: Sequence[str] = ()) -> list[Path]:
    """Write a plan as a page with a picture.

    Args:
        advice: lines about other settings, from `report.advice`.

    Returns:
        The files written: the page, and the picture as PNG.

    Raises:
        UserError: matplotlib is missing, or a file can't be written.
    """
    figure = over_time("Memory over the last micro-batch of a step", plan.memory.points)
    text = "\n".join([report.describe(plan), *advice])
    parts = [f'<p class="{"good" if plan.fits else "bad"}">{html.escape(report.verdict(plan))}</p>']
    parts += [f"<pre>{html.escape(text)}</pre>", page.svg(figure)]
    title = f"{plan.config.name}: {plan.ranks} × {plan.device.name}"
    return page.write(path, title, parts, {"over_time": figure})


def over_time(title: str, points: Sequence[Point]) -> Any:
    """Draw memory over a step by category, with its phases named."""
    drawn = _thinned(points)
    peak = max(drawn, key=lambda point: point.total)
    top = (peak.position, peak.total / GIB)
    figure = new_figure(8.4, 3.6)
    axes = style_axes(figure.add_subplot(), title)
    names = [name for name in CATEGORIES if max(point.bytes[name] for point in drawn) > 0.002 * peak.total]
    axes.stackplot(
        [point.position for point in drawn],
        [[point.bytes[name] / GIB for point in drawn] for name in names],
        colors=[COLOURS[name] for name in names],
        labels=[TITLES[name] for name in names],
        linewidth=0,
    )
    axes.plot(*top, "o", color="#222222", markersize=4)
    axes.annotate(f"{top[1]:.3g} GiB", top, textcoords="offset points", xytext=(0, 5), fontsize=9, ha="center")
    axes.set_ylim(0, 1.1 * top[1])
    axes.set_xlim(0, len(PHASES))
    for start in range(1, len(PHASES)):
        axes.axvline(start, color="#888888", linewidth=0.8)
    axes.set_xticks([start + 0.5 for start in range(len(PHASES))], PHASES)
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("GiB on one device", fontsize=9)
    legend(axes, reverse=True)
    return figure


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return the greatest point of each stretch of a micro-batch, and all after it."""
    micro_batch, length = points[:-AFTER_BACKWARD], -(-len(points) // SHOWN_POINTS)
    stretches = (micro_batch[start : start + length] for start in range(0, len(micro_batch), length))
    return [*(max(stretch, key=lambda point: point.total) for stretch in stretches), *points[-AFTER_BACKWARD:]]
