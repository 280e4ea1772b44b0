"""Draw a rank's memory over a step, and write a plan as an HTML page with this picture."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_tp.base import page
from zero_tp.base.constants import GIB
from zero_tp.base.page import PALETTE, TABLE_ROWS, legend, new_figure, style_axes, values_table
from zero_tp.tools.planning import plan_report as report
from zero_tp.tools.planning.memory import CATEGORIES, Point
from zero_tp.tools.planning.plan import Estimate, Plan
from zero_tp.tools.planning.plan_report import TITLES

COLOURS = {
    name: PALETTE[colour]
    for name, colour in zip(
        CATEGORIES, ("blue", "cyan", "green", "yellow", "grey", "red", "purple"), strict=True
    )
}
AXIS_LABELS = ("forward", "backward", "optimizer")
SHOWN_POINTS = 600
LIMIT_RATIO = 3
"""A limit is drawn if it is less than this many times the peak."""
POINTS_AFTER_BACKWARD = 4
"""Number of points of a step after its last micro-batch (`RankMemory.points`)."""


def write_page(
    plan: Plan, path: Path, advice: Sequence[str] = (), fastest: Estimate | None = None
) -> list[Path]:
    """Write a plan as a page with a picture.

    Args:
        advice: lines about other settings, from `report.search_lines`.
        fastest: a search's fastest candidate, drawn next to the present settings.

    Returns:
        The written files: the page, and the picture as PNG.
    """
    shown = {"the present settings": plan} | ({"the fastest settings": fastest} if fastest else {})
    figure = memory_over_time(
        {title: (estimate.memory.points, estimate.usable) for title, estimate in shown.items()}
    )
    text = "\n".join([report.describe(plan), *advice])
    parts = [
        f'<p class="{"good" if plan.fits else "bad"}">{html.escape(report.verdict(plan))}</p>',
        f"<pre>{html.escape(text)}</pre>",
        "<h2>Memory over the last micro-batch of a step</h2>",
        page.svg(figure),
        *(_values(title, estimate.memory.points) for title, estimate in shown.items()),
    ]
    return page.write(
        path, f"{plan.config.name}: {plan.ranks} × {plan.device.name}", parts, {"over_time": figure}
    )


def memory_over_time(shown: Mapping[str, tuple[Sequence[Point], float | None]]) -> Any:
    """Draw memory over a step by category and phase.

    Args:
        shown: title → the points of a step, and the most bytes of tensors that fit, or None. All
            have one scale.
    """
    every = [point for points, _ in shown.values() for point in points]
    top = max(point.total for point in every)
    # A limit far above the peak would press the curve flat.
    limits = [
        limit for _, limit in shown.values() if limit is not None and limit < LIMIT_RATIO * top
    ]
    names = [name for name in CATEGORIES if any(point.bytes[name] > 0.002 * top for point in every)]
    figure = new_figure(8.4 if len(shown) == 1 else 11.0, 3.6)
    for number, (title, (points, limit)) in enumerate(shown.items(), start=1):
        axes = style_axes(figure.add_subplot(1, len(shown), number), title)
        peak = _draw_points(axes, _downsampled(points, SHOWN_POINTS), names)
        if limit is not None and limit in limits:
            axes.axhline(
                limit / GIB,
                color="#000000",
                linewidth=1,
                linestyle="--",
                label="limit (memory minus margins)",
            )
        # One scale for both plots: the comparison is by height.
        axes.set_ylim(0, 1.08 * max(top, *limits, 0) / GIB)
        if number == 1:
            axes.set_ylabel("GiB on one device", fontsize=9)
        limit_text = "" if limit is None else f", limit {limit / GIB:.4g} GiB"
        axes.set_xlabel(f"peak {peak.total / GIB:.4g} GiB{limit_text}", fontsize=9)
    legend(axes, reverse=True)
    return figure


def _draw_points(axes: Any, points: Sequence[Point], names: Sequence[str]) -> Point:
    """Draw the categories as a stack, mark the peak and return it."""
    peak = max(points, key=lambda point: point.total)
    axes.stackplot(
        [point.position for point in points],
        [[point.bytes[name] / GIB for point in points] for name in names],
        colors=[COLOURS[name] for name in names],
        labels=[TITLES[name] for name in names],
        linewidth=0,
    )
    axes.plot(peak.position, peak.total / GIB, "o", color="#000000", markersize=4)
    axes.set_xlim(0, len(AXIS_LABELS))
    for start in range(1, len(AXIS_LABELS)):
        axes.axvline(start, color="#888888", linewidth=0.8)
    axes.set_xticks([start + 0.5 for start in range(len(AXIS_LABELS))], AXIS_LABELS)
    axes.tick_params(axis="x", length=0)
    return peak


def _values(title: str, points: Sequence[Point]) -> str:
    """Return a step's memory as an HTML table that opens on a click."""
    shown = _downsampled(points, TABLE_ROWS - POINTS_AFTER_BACKWARD)
    names = [name for name in CATEGORIES if any(point.bytes[name] for point in shown)]
    rows = [
        (
            _moment(point.position),
            f"{point.total / GIB:.4g}",
            *(f"{point.bytes[name] / GIB:.3g}" for name in names),
        )
        for point in shown
    ]
    return values_table(f"{title} [GiB]", ("at", "total", *(TITLES[name] for name in names)), rows)


def _moment(position: float) -> str:
    """Return a position on the axis in words: `backward 25 %`."""
    phase = min(int(position), len(AXIS_LABELS) - 1)
    return f"{AXIS_LABELS[phase]} {100 * (position - phase):.0f} %"


def _downsampled(points: Sequence[Point], most: int) -> list[Point]:
    """Return the highest point of each interval of the micro-batch.

    All points after the micro-batch follow.

    Args:
        most: number of intervals of the whole step.
    """
    micro_batch = points[:-POINTS_AFTER_BACKWARD]
    # The highest of each interval, and not every n-th point, so that the drawn peak is the planned
    # one.
    length = -(-len(points) // most)
    intervals = (
        micro_batch[start : start + length] for start in range(0, len(micro_batch), length)
    )
    return [
        *(max(interval, key=lambda point: point.total) for interval in intervals),
        *points[-POINTS_AFTER_BACKWARD:],
    ]
