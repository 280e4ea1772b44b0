"""One reproduced result: measured, planned and published figures as text, page and pictures."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.dated import provenance
from benchmarks.papers import pictures
from benchmarks.papers.rows import COLUMNS, Table
from zero_tp.base import page
from zero_tp.base.files import write_named


@dataclass(frozen=True)
class Reproduction:
    """A reproduced result of a paper.

    Attributes:
        tables: rows by heading: the model and its devices.
        draw: returns matplotlib's figures by the suffix of their file names; by default bars of all
            rows.
        notes: differences from the paper, and their reasons.
    """

    title: str
    tables: Mapping[str, Table]
    draw: Callable[[], dict[str, Any]] | None = None
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the tables and notes for a terminal."""
        lines = [self.title]
        for heading, rows in self.tables.items():
            lines += ["", *aligned(heading, rows)]
        return "\n".join([*lines, *(["", *self.notes] if self.notes else [])])

    def write(self, directory: Path, name: str) -> list[Path]:
        """Write NAME.html, its pictures as PNG, and NAME.json with date and versions.

        Raises:
            UserError: matplotlib is missing, or a file can't be written.
        """
        figures = self.draw() if self.draw else {"": pictures.bars(self.tables)}
        parts = [page.svg(figure) for figure in figures.values()]
        for heading, rows in self.tables.items():
            head, *cells = in_cells(heading, rows)
            parts += [
                f"<h2>{html.escape(heading)}</h2>",
                page.table(("", *head[1:]), cells, "figures"),
            ]
        parts += [
            f"<p>{html.escape(note)}</p>"
            for note in (*self.notes, f"{provenance()['date']}, {provenance()['machine']}")
        ]
        written = page.write(directory / f"{name}.html", self.title, parts, figures)
        tables = {heading: [asdict(row) for row in rows] for heading, rows in self.tables.items()}
        record = {**provenance(), "title": self.title, "tables": tables, "notes": self.notes}
        write_named(
            directory / f"{name}.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        )
        return [*written, directory / f"{name}.json"]


def in_cells(heading: str, rows: Table) -> list[tuple[str, ...]]:
    """Return the cells of a table with its head; columns without a figure are left out."""
    shown = [name for name in COLUMNS if any(name in row.figures for row in rows)]
    compared = any(row.off for row in rows)
    noted = any(row.note for row in rows)
    head = [heading, *shown, *(["off"] if compared else []), *([""] if noted else [])]
    lines = [tuple(head)]
    for row in rows:
        cells = [f"{row.label} [{row.unit}]" if row.unit else row.label]
        cells += [
            "" if (value := row.figures.get(name)) is None else written_out(value) for name in shown
        ]
        cells += [row.off] if compared else []
        lines.append((*cells, *([row.note] if noted else [])))
    return lines


def written_out(value: float) -> str:
    """Format a figure with four digits, or all digits before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def aligned(heading: str, rows: Table) -> list[str]:
    """Return a table's lines for a terminal; labels and notes are flush left."""
    (_, *head), *lines = in_cells(heading, rows)
    left = [number for number, name in enumerate(("", *head)) if not name]
    return [heading, *(f"  {line}" for line in page.text_table([("", *head), *lines], left))]
