"""Draw a plan as matplotlib figures, the same for the page and for PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from zero_tp.constants import GIB
from zero_tp.page import PALETTE, legend, new_figure, style_axes
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
LIMIT = "#222222"
PHASES = {"forward": 0.0, "backward": 1.0, "optimizer": 2.0}
SHOWN_POINTS = 600
PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}


def _axes(title: str, height: float = 3.6) -> tuple[Any, Any]:
    """Return a new figure and its axes."""
    figure = new_figure(8.4, height)
    return figure, style_axes(figure.add_subplot(), title)


def _present(stacks: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the categories that are somewhere more than 0.2 % of the largest stack."""
    largest = max(sum(stack.values()) for stack in stacks) or 1.0
    return [name for name in CATEGORIES if max(stack.get(name, 0.0) for stack in stacks) > 0.002 * largest]


def bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float | None) -> Any:
    """Draw horizontal stacked bars in GiB: of each label its bytes by category."""
    figure, axes = _axes(title, 1.4 + 0.5 * len(stacks))
    left = [0.0] * len(stacks)
    for name in _present(list(stacks.values())):
        sizes = [stack.get(name, 0.0) / GIB for stack in stacks.values()]
        axes.barh(list(stacks), sizes, left=left, color=COLOURS[name], label=TITLES[name], height=0.62)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    widest = max(left)
    for number, total in enumerate(left):
        axes.text(total + 0.006 * max(left), number, _figure(total), va="center", fontsize=9, zorder=4, bbox=PAPER)
    shown = limit if limit is not None and limit < 8 * widest else None
    axes.set_xlim(0, 1.12 * max(widest, shown or 0.0))
    if shown is not None:
        axes.axvline(shown, color=LIMIT, linestyle="--", linewidth=1.2)
        at = axes.get_xaxis_transform()
        axes.text(shown, 0.01, f" device: {shown:g} GiB", transform=at, fontsize=8, va="bottom")
    axes.invert_yaxis()
    beyond = f"; the device's {limit:g} GiB are far to the right" if limit is not None and shown is None else ""
    axes.set_xlabel(f"GiB on one device{beyond}", fontsize=9)
    legend(axes, reverse=True)
    return figure


def _figure(gib: float) -> str:
    return f"{gib:.0f}" if gib >= 100 else f"{gib:.3g}"


def over_time(title: str, steps: Mapping[str, Sequence[Point]], limit: float | None, label: str = "one step") -> Any:
    """Draw memory over steps by category, one after another, with the steps and their phases named."""
    length = 1 + max(PHASES.values())
    drawn = [
        replace(point, position=number * length + point.position)
        for number, points in enumerate(steps.values())
        for point in _thinned(points)
    ]
    peak = max(drawn, key=lambda point: point.total)
    top = (peak.position, peak.total / GIB)
    figure, axes = _axes(title)
    names = _present([point.bytes for point in drawn])
    axes.stackplot(
        [point.position for point in drawn],
        [[point.bytes.get(name, 0.0) / GIB for point in drawn] for name in names],
        colors=[COLOURS[name] for name in names],
        labels=[TITLES[name] for name in names],
        linewidth=0,
    )
    shown = limit if limit is not None and limit < 4 * top[1] else None
    axes.set_ylim(0, 1.1 * max(top[1], shown or 0.0))
    axes.set_xlim(drawn[0].position, drawn[-1].position)
    if shown is not None:
        axes.axhline(shown, color=LIMIT, linestyle="--", linewidth=1.2)
        at = axes.get_yaxis_transform()
        axes.text(0.005, shown, f"device: {shown:g} GiB", transform=at, fontsize=8, va="bottom", color=LIMIT)
    axes.set_xlabel(label, fontsize=9)
    axes.set_ylabel("GiB on one device", fontsize=9)
    legend(axes, reverse=True)
    starts = [number * length + start for number in range(len(steps)) for start in PHASES.values()]
    for start in starts[1:]:
        axes.axvline(start, color="#888888", linewidth=0.8 if start % length else 1.8)
    axes.set_xticks([start + 0.5 for start in starts], list(PHASES) * len(steps))
    axes.tick_params(axis="x", length=0)
    if len(steps) > 1:
        for number, name in enumerate(steps):
            at = axes.get_xaxis_transform()
            axes.text(number * length + 0.05, 0.98, name, transform=at, fontsize=9, va="top")
    axes.plot(*top, "o", color=LIMIT, markersize=4)
    right = peak.position > len(steps) * length - 0.8
    axes.annotate(f"{_figure(top[1])} GiB", top, textcoords="offset points", xytext=(-6 if right else 6, 4), fontsize=9,
                  ha="right" if right else "left")  # fmt: skip
    return figure


def _thinned(points: Sequence[Point]) -> list[Point]:
    """Return, of many points, the greatest of each stretch of a phase, and the last stretch of each phase whole."""
    length = -(-len(points) // SHOWN_POINTS)
    thinned: list[Point] = []
    for _, group in groupby(points, lambda point: point.phase):
        phase = list(group)
        stretches = [phase[start : start + length] for start in range(0, len(phase), length)]
        thinned += [max(stretch, key=lambda point: point.total) for stretch in stretches[:-1]] + stretches[-1]
    return thinned


def seconds(title: str, terms: Mapping[str, float]) -> Any:
    """Draw horizontal bars, in the order given."""
    shown = {name: value for name, value in terms.items() if value > 0}
    figure, axes = _axes(title, 1.3 + 0.32 * len(shown))
    total = sum(shown.values())
    axes.barh(list(shown), list(shown.values()), color=PALETTE["blue"], height=0.65)
    for number, value in enumerate(shown.values()):
        axes.text(value, number, f" {value:.3g} s, {value / total:.0%}", va="center", fontsize=9)
    axes.set_xlim(0, 1.25 * max(shown.values()))
    axes.invert_yaxis()
    axes.set_xlabel("seconds of one step", fontsize=9)
    return figure


# ---- of a plan -------------------------------------------------------------------------------------------------------


def of_plan(plan: Plan) -> dict[str, Any]:
    """Return every figure of a plan by the name of its file."""
    limit = plan.device.memory_gib
    points = plan.memory.points
    return {
        "memory": bars("Memory of each rank, by category", _rank_bars(plan, points), limit),
        "over_time": over_time(
            "Memory over time",
            {"first step": plan.memory.first_points, "later steps": points},
            limit,
            "the last micro-batch of a step",
        ),
        "time": seconds("Time of one step by term, an estimate", plan.time.terms()),
    }


def _rank_bars(plan: Plan, points: Sequence[Point]) -> dict[str, Mapping[str, float]]:
    paper = plan.paper.bytes()
    paper["activations"] += paper.pop("outside layers")

    def most_in(phase: str) -> Mapping[str, float]:
        return max((point for point in points if point.phase == phase), key=lambda point: point.total).bytes

    return {
        "as the papers count": paper,
        "most in forward": most_in("forward"),
        "most in backward": most_in("backward"),
        "most in the step": most_in("step"),
        "between steps": points[-1].bytes,
    }
