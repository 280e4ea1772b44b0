"""Draw a plan's memory with matplotlib, and write the plan as a page with these pictures."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
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
    "parameters": PALETTE["blue"],
    "gathered": PALETTE["cyan"],
    "gradients": PALETTE["green"],
    "optimizer": PALETTE["yellow"],
    "buffers": PALETTE["grey"],
    "activations": PALETTE["red"],
    "transients": PALETTE["purple"],
}
PHASES = ("forward", "backward", "optimizer")
SHOWN_POINTS = 600
AFTER_BACKWARD = 4
"""The last points of a step, after those of its last micro-batch (`RankMemory.points`)."""


def write_page(plan: Plan, path: Path, advice: Sequence[str] = ()) -> list[Path]:
    """Write a plan as a page with its pictures.

    Args:
        advice: lines about other settings, from `report.advice`.

    Returns:
        The files written: the page, then a PNG for each picture.

    Raises:
        UserError: matplotlib is missing, or a file can't be written.
    """
    figures = {
        "memory": bars("Memory of each rank, by category", _rank_bars(plan), plan.device.memory_gib),
        "over_time": over_time("Memory over the last micro-batch of a step", plan.memory.points),
    }
    text = "\n".join([report.describe(plan), *advice])
    parts = [f'<p class="{"good" if plan.fits else "bad"}">{html.escape(report.verdict(plan))}</p>']
    parts.append(f"<pre>{html.escape(text)}</pre>")
    parts += [page.svg(figure) for figure in figures.values()]
    title = f"{plan.config.name}: {plan.ranks} × {plan.device.name}"
    return page.write(path, title, parts, figures)


def _rank_bars(plan: Plan) -> dict[str, Mapping[str, float]]:
    paper, points = plan.paper.bytes(), plan.memory.points
    paper["activations"] += paper.pop("outside layers")
    bars: dict[str, Mapping[str, float]] = {"as the papers count": paper}
    for phase in ("forward", "backward", "step"):
        most = max((point for point in points if point.phase == phase), key=lambda point: point.total)
        bars[f"most in {phase}"] = most.bytes
    return {**bars, "between steps": points[-1].bytes}


def _present(stacks: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the categories that are somewhere more than 0.2 % of the largest stack."""
    largest = max(sum(stack.values()) for stack in stacks)
    return [name for name in CATEGORIES if max(stack.get(name, 0.0) for stack in stacks) > 0.002 * largest]


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float | None) -> Any:
    """Draw horizontal stacked bars in GiB: for each label its bytes by category.

    Args:
        limit: the device's memory [GiB], a line where it is less than four times the longest bar.
    """
    figure = new_figure(8.4, 1.4 + 0.5 * len(stacks))
    axes = style_axes(figure.add_subplot(), title)
    left = [0.0] * len(stacks)
    for name in _present(list(stacks.values())):
        sizes = [stack.get(name, 0.0) / GIB for stack in stacks.values()]
        axes.barh(list(stacks), sizes, left=left, color=COLOURS[name], label=TITLES[name], height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for number, total in enumerate(left):
        axes.text(total, number, f" {total:.3g}", va="center", fontsize=9)
    line = limit if limit is not None and limit < 4 * max(left) else 0.0
    if line:
        axes.axvline(line, color="#222222", linestyle="--", linewidth=1.2)
    axes.set_xlim(0, 1.12 * max(*left, line))
    axes.invert_yaxis()
    axes.set_xlabel("GiB on one device" if limit is None else f"GiB on one device, which has {limit:g}", fontsize=9)
    legend(axes, reverse=True)
    return figure


def over_time(title: str, points: Sequence[Point]) -> Any:
    """Draw memory over a step by category, with its phases named."""
    drawn = _thinned(points)
    peak = max(drawn, key=lambda point: point.total)
    top = (peak.position, peak.total / GIB)
    figure = new_figure(8.4, 3.6)
    axes = style_axes(figure.add_subplot(), title)
    names = _present([point.bytes for point in drawn])
    axes.stackplot(
        [point.position for point in drawn],
        [[point.bytes.get(name, 0.0) / GIB for point in drawn] for name in names],
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
