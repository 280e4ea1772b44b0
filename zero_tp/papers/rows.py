"""A row is one quantity of a result, as far as it was measured, planned and published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        return {name: value for name in COLUMNS if (value := getattr(self, name)) is not None}

    @property
    def off(self) -> float | None:
        """Return how far the first figure is from the last, as a share of the last."""
        values = list(self.figures.values())
        return values[0] / values[-1] - 1 if len(values) > 1 and values[-1] else None


Table = Sequence[Row]
