"""A row is one quantity of a result, as far as it was measured, planned and published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

COLUMNS = ("measured", "planned", "formula", "published")
"""What a row may have, from what is most ours to what is most theirs."""


@dataclass(frozen=True)
class Row:
    """A row has the figures of one quantity, as far as there are any.

    Attributes:
        measured: in a real run. planned: by the planner. formula: the paper's, for the same sizes. published: printed
            in the paper.
        note: what they are not.
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
        """Return those that there are, by column."""
        return {name: value for name in COLUMNS if (value := getattr(self, name)) is not None}

    def having(self, figures: Mapping[str, float]) -> Row:
        """Return the row with these figures, by column."""
        changes: dict[str, Any] = dict(figures)
        return replace(self, **changes)

    @property
    def off(self) -> str:
        """Return how far the first figure is from the last, of the last, of per cents in points; "" for one alone."""
        values = list(self.figures.values())
        if len(values) < 2 or not values[-1]:
            return ""
        first, last = values[0], values[-1]
        return f"{first - last:+.1f} pt" if self.unit == "%" else f"{first / last - 1:+.1%}"


Table = Sequence[Row]
Columns = Mapping[str, Mapping[str, float]]
"""Of each of COLUMNS the figures by label, as far as there are any."""


def rows(unit: str, columns: Columns, size: float = 1.0, notes: Mapping[str, str] | None = None) -> list[Row]:
    """Return the rows of a table that is given by its columns: one for each label, in the order in which they come.

    Args:
        size: of the unit, by which they are divided; those published are in the unit already.
        notes: by label.
    """
    sizes = {name: 1.0 if name == "published" else size for name in columns}
    return [
        Row(label, unit, note=(notes or {}).get(label, "")).having(
            {name: figures[label] / sizes[name] for name, figures in columns.items() if label in figures}
        )
        for label in dict.fromkeys(label for figures in columns.values() for label in figures)
    ]
