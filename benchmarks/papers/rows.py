"""Rows of a result: one quantity as measured, planned and published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

COLUMNS = ("measured", "planned", "formula", "published")
"""The figures that a row may have."""


@dataclass(frozen=True)
class Row:
    """The figures of one quantity; None if there is none.

    Attributes:
        measured: in a real run.
        planned: by the planner.
        formula: by the paper's formula, for the same sizes.
        published: printed in the paper.
        note: a remark about the figures.
    """

    label: str
    unit: str
    measured: float | None = None
    planned: float | None = None
    formula: float | None = None
    published: float | None = None
    note: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures that are not None, by column."""
        return {name: value for name in COLUMNS if (value := getattr(self, name)) is not None}

    def having(self, figures: Mapping[str, float]) -> Row:
        """Return this row with other figures, by column."""
        changes: dict[str, Any] = dict(figures)
        return replace(self, **changes)

    @property
    def off(self) -> str:
        """Return the first figure's deviation from the last, for percentages in points; "" for a
        single figure.
        """
        values = list(self.figures.values())
        if len(values) < 2 or not values[-1]:
            return ""
        first = values[0]
        last = values[-1]
        return f"{first - last:+.1f} pt" if self.unit == "%" else f"{first / last - 1:+.1%}"


Table = Sequence[Row]
Columns = Mapping[str, Mapping[str, float]]
"""Column of COLUMNS → label → figure."""


def rows(
    unit: str, columns: Columns, size: float = 1.0, notes: Mapping[str, str] | None = None
) -> list[Row]:
    """Return a row for each label of the columns, in order of first appearance.

    Args:
        size: of the unit, by which figures are divided, except published ones.
        notes: by label.
    """
    sizes = {name: 1.0 if name == "published" else size for name in columns}
    return [
        Row(label, unit, note=(notes or {}).get(label, "")).having(
            {
                name: figures[label] / sizes[name]
                for name, figures in columns.items()
                if label in figures
            }
        )
        for label in dict.fromkeys(label for figures in columns.values() for label in figures)
    ]
