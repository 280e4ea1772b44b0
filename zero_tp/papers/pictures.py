"""Draw a reproduction's figures beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_tp.page import dressed, new_figure
from zero_tp.papers.rows import Table

# Paul Tol's "bright" scheme, which colour-blind people can tell apart.
COLOURS = {"measured": "#4477AA", "planned": "#EE6677", "formula": "#CCBB44", "published": "#BBBBBB"}


def bars(tables: Mapping[str, Table]) -> Any:
    """Draw the figures of each row as bars beside each other, each table in axes of its own."""
    heights = [sum(len(row.figures) for row in rows) + 0.6 * len(rows) for rows in tables.values()]
    figure = new_figure(8.4, 0.9 * len(tables) + 0.17 * sum(heights))
    every = figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (heading, rows) in zip(every, tables.items(), strict=True):
        _table(dressed(axes, heading), rows)
    return figure


def _table(axes: Any, rows: Table) -> None:
    units = {row.unit for row in rows}
    middles, named, at = [], set[str](), 0.0
    for row in rows:
        middles.append(at + (len(row.figures) - 1) / 2)
        for name, value in row.figures.items():
            label = name if name not in named else None
            named.add(name)
            axes.barh(at, value, height=0.9, color=COLOURS[name], label=label)
            axes.text(value, at, f" {value:,.4g}", va="center", fontsize=7)
            at += 1
        at += 0.6
    axes.set_yticks(middles, [row.label if len(units) == 1 else f"{row.label} [{row.unit}]" for row in rows])
    axes.set_xlim(0, 1.12 * max(value for row in rows for value in row.figures.values()))
    axes.set_ylim(at - 0.6, -0.9)
    if len(units) == 1:
        axes.set_xlabel(units.pop(), fontsize=9)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
