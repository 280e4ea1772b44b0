"""Draw the figures of a reproduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.papers.rows import Table
from zero_tp.base.constants import GIB
from zero_tp.base.page import legend, new_figure, style_axes
from zero_tp.tools.planning.memory import CATEGORIES
from zero_tp.tools.planning.pictures import COLOURS as KINDS
from zero_tp.tools.planning.plan_report import TITLES

# Paul Tol's "bright" scheme, which colour-blind people can tell apart.
COLOURS = {
    "measured": "#4477AA",
    "planned": "#EE6677",
    "formula": "#CCBB44",
    "published": "#BBBBBB",
}
SERIES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE")

LINES = ("#BBBBBB", "#66CCEE", "#EE6677", "#222222")


def bars(tables: Mapping[str, Table]) -> Any:
    """Draw each row's figures as bars, with one pair of axes for each table and unit."""
    panels = [
        (heading if number == 0 else "", unit, [row for row in rows if row.unit == unit])
        for heading, rows in tables.items()
        for number, unit in enumerate(dict.fromkeys(row.unit for row in rows))
    ]
    heights = [sum(len(row.figures) for row in rows) + 0.6 * len(rows) for _, _, rows in panels]
    figure = new_figure(8.4, 0.9 * len(panels) + 0.17 * sum(heights))
    every = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (heading, unit, rows) in zip(every, panels, strict=True):
        _panel(style_axes(axes, heading), rows)
        axes.set_xlabel(unit, fontsize=9)
    return figure


def memory_bars(title: str, stacks: Mapping[str, Mapping[str, float]], limit: float | None) -> Any:
    """Draw horizontal stacked bars in GiB: for each label its bytes by category.

    Args:
        limit: the device's memory [GiB], a line if it is less than four times the longest bar.
    """
    figure = new_figure(8.4, 1.4 + 0.5 * len(stacks))
    axes = style_axes(figure.add_subplot(), title)
    largest = max(sum(stack.values()) for stack in stacks.values())
    left = [0.0] * len(stacks)
    for name in CATEGORIES:
        if all(stack.get(name, 0.0) <= 0.002 * largest for stack in stacks.values()):
            continue
        sizes = [stack.get(name, 0.0) / GIB for stack in stacks.values()]
        axes.barh(
            list(stacks), sizes, left=left, color=KINDS[name], label=TITLES[name], height=0.62
        )
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    for number, total in enumerate(left):
        axes.text(total, number, f" {total:.3g}", va="center", fontsize=9)
    line = limit if limit is not None and limit < 4 * max(left) else 0.0
    if line:
        axes.axvline(line, color="#222222", linestyle="--", linewidth=1.2)
    axes.set_xlim(0, 1.12 * max(*left, line))
    axes.invert_yaxis()
    axes.set_xlabel(
        "GiB on one device" if limit is None else f"GiB on one device, which has {limit:g}",
        fontsize=9,
    )
    legend(axes, reverse=True)
    return figure


def columns(title: str, tables: Mapping[str, Table], label: str) -> Any:
    """Draw the first figure of each row as columns: grouped by table, a colour for each label."""
    figure = new_figure(8.4, 3.8)
    axes = style_axes(figure.add_subplot(), title)
    labels = list(dict.fromkeys(row.label for rows in tables.values() for row in rows))
    width = 0.8 / len(labels)
    for number, name in enumerate(labels):
        values = {
            at + width * (number - (len(labels) - 1) / 2): next(iter(row.figures.values()))
            for at, rows in enumerate(tables.values())
            for row in rows
            if row.label == name
        }
        axes.bar(
            list(values),
            list(values.values()),
            width=0.95 * width,
            color=SERIES[number],
            label=name,
        )
        for at, value in values.items():
            axes.text(at, value, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(
        range(len(tables)), [heading.split(":")[0].replace(", ", "\n") for heading in tables]
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label, fontsize=9)
    legend(axes)
    return figure


def by_length(title: str, tables: Mapping[str, Table]) -> Any:
    """Draw the rows "s …, b 1" over s, one pair of axes for each table; measured values are
    points.
    """
    figure = new_figure(8.4, 2.9 * -(-len(tables) // 2))
    every = figure.subplots(-(-len(tables) // 2), 2, squeeze=False).flatten()
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    for axes, (heading, rows) in zip(every, tables.items(), strict=False):
        style_axes(axes, "").set_title(heading, loc="left", fontsize=9)
        lengths = {
            int(row.label.split()[1].rstrip(",")): row
            for row in rows
            if row.label.endswith(", b 1")
        }
        for name, style in {"formula": ":", "planned": "-", "measured": "o"}.items():
            drawn = {
                length: row.figures[name] for length, row in lengths.items() if name in row.figures
            }
            if drawn:
                axes.plot(list(drawn), list(drawn.values()), style, color=COLOURS[name], label=name)
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.set_xlabel("tokens of a sequence", fontsize=9)
        axes.set_ylabel("MiB", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
    for axes in every[len(tables) :]:
        axes.set_visible(False)
    return figure


def kept_micro_batches(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], memory: float
) -> Any:
    """Draw memory and time by the number of micro-batches that keep everything: (GiB, seconds)
    of 0, 1, …
    """
    figure = new_figure(8.4, 3.4)
    left, right = figure.subplots(1, 2)
    style_axes(left, title), style_axes(right, "")
    for (name, points), colour in zip(curves.items(), SERIES, strict=False):
        share = [100 * number / (len(points) - 1) for number in range(len(points))]
        sizes, seconds = zip(*points, strict=True)
        left.plot(share, sizes, ".-", color=colour, label=name)
        right.plot(
            share, [100 * (one / seconds[0] - 1) for one in seconds], ".-", color=colour, label=name
        )
    left.axhline(memory, color="#222222", linestyle="--", linewidth=1.2)
    left.text(0, memory, f"device: {memory:g} GiB", fontsize=8, va="bottom")
    left.set_ylabel("GiB on the first stage's device", fontsize=9)
    right.set_ylabel("time of an iteration, % of recomputing all", fontsize=9)
    for axes in (left, right):
        axes.set_xlabel("% of the micro-batches in flight that keep everything", fontsize=9)
        axes.legend(fontsize=8, frameon=False)
    left.set_ylim(0)
    return figure


def _panel(axes: Any, rows: Table) -> None:
    middles = []
    named = set[str]()
    at = 0.0
    for row in rows:
        middles.append(at + (len(row.figures) - 1) / 2)
        for name, value in row.figures.items():
            label = name if name not in named else None
            named.add(name)
            axes.barh(at, value, height=0.9, color=COLOURS[name], label=label)
            axes.text(max(value, 0), at, f" {value:,.4g}", va="center", fontsize=7)
            at += 1
        at += 0.6
    axes.set_yticks(middles, [row.label for row in rows])
    values = [value for row in rows for value in row.figures.values()]
    axes.set_xlim(1.12 * min(0, *values), 1.12 * max(values))
    axes.set_ylim(at - 0.6, -0.9)
    legend(axes)


def stacked(groups: Mapping[str, tuple[str, Mapping[str, Mapping[str, float]]]]) -> dict[str, Any]:
    """Draw stacked bars of bytes by category, with axes for each heading → (unit, stacks)
    (ZeRO's figure 1).
    """
    heights = [len(stacks) + 1.2 for _, stacks in groups.values()]
    figure = new_figure(8.4, 0.32 * sum(heights))
    every = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (heading, (unit, stacks)) in zip(every, groups.items(), strict=True):
        style_axes(axes, heading)
        ends = dict.fromkeys(stacks, 0.0)
        for kind in next(iter(stacks.values())):
            sizes = [stack[kind] for stack in stacks.values()]
            axes.barh(
                list(stacks),
                sizes,
                left=list(ends.values()),
                color=KINDS[kind],
                label=TITLES[kind],
                height=0.7,
            )
            ends = {name: end + size for (name, end), size in zip(ends.items(), sizes, strict=True)}
        for number, end in enumerate(ends.values()):
            axes.text(end, number, f" {end:,.4g} {unit}", va="center", fontsize=8)
        axes.set_xlim(0, 1.15 * max(ends.values()))
        axes.invert_yaxis()
    legend(every[0], reverse=True)
    return {"": figure}


def losses(
    panels: Mapping[str, Mapping[str, Sequence[float]]], of: str
) -> Callable[[], dict[str, Any]] | None:
    """Return a function that draws losses by step, with axes for each panel, or None if there are
    no losses.

    Later lines are thinner, so that equal ones show.
    """
    if not any(panels.values()):
        return None

    def draw() -> dict[str, Any]:
        figure = new_figure(8.4, 3.8)
        every = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (heading, lines) in zip(every, panels.items(), strict=True):
            style_axes(axes, heading)
            for number, (name, values) in enumerate(lines.items()):
                width = 1.2 + 1.6 * (len(lines) - 1 - number)
                colour = LINES[number % len(LINES)]
                axes.plot(
                    range(1, len(values) + 1), values, color=colour, linewidth=width, label=name
                )
            axes.set_xlabel("step", fontsize=9)
            axes.set_ylabel(f"nats a {of}", fontsize=9)
            axes.legend(fontsize=8, frameon=False)
        return {"": figure}

    return draw
