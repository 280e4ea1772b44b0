"""Draw figures, and write them into an HTML page and PNG files next to it.

The page loads nothing from a network.
Reports of runs, plans, profiles and corpora use it. Tables for a terminal are laid out here too.
"""

from __future__ import annotations

import html
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.base.files import write_named

# Paul Tol's "bright" scheme, which colour-blind people can tell apart.
PALETTE = {"blue": "#4477AA", "cyan": "#66CCEE", "green": "#228833", "yellow": "#CCBB44"}
PALETTE |= {"red": "#EE6677", "purple": "#AA3377", "grey": "#BBBBBB"}
TABLE_ROWS = 50
"""Most rows of the table of a curve's values."""
STYLE = """
:root { color-scheme: light dark; --text: #222; --page: #fff; --shade: #f5f5f5; }
:root { --good: #176117; --bad: #a11; }
@media (prefers-color-scheme: dark) {
  :root { --text: #ddd; --page: #191b1e; --shade: #26292d; --good: #7c7; --bad: #f88; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
pre { background: var(--shade); padding: .8rem 1rem; white-space: pre-wrap; font-size: 13px; }
code { white-space: pre; background: var(--shade); }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; fill: currentColor; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: .25rem .7rem; text-align: right; }
td:last-child, th:last-child { text-align: left; }
tr:nth-child(even) td { background: var(--shade); }
.keys td, .keys th { text-align: left; vertical-align: top; overflow-wrap: break-word; }
.keys th, .keys td:first-child { white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
"""


def write(path: Path, title: str, parts: Iterable[str], figures: Mapping[str, Any]) -> list[Path]:
    """Write a page and its figures as PNG next to it: OUT.html, OUT_memory.png, …

    Args:
        parts: HTML elements of the page's body.
        figures: by the suffix of their file names; "" is OUT.png.

    Returns:
        The files written, the page first.
    """
    name = html.escape(title)
    body = "\n".join(parts)
    head = f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
    text = f"{head}\n<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n{body}\n</body></html>\n"
    write_named(path, text)
    pictures = {
        path.with_name(f"{path.stem}{suffix and '_'}{suffix}.png"): figures[suffix]
        for suffix in figures
    }
    for picture, figure in pictures.items():
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        write_named(picture, png.getvalue())
    return [path, *pictures]


def table(header: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return an HTML table of text cells.

    Args:
        kind: CSS class; "keys" for columns of text rather than numbers.
    """

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [row(header, "th"), *(row(cells, "td") for cells in rows)]
    return f'<div class="wide"><table class="{kind}">{"".join(lines)}</table></div>'


def values_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the values behind a curve as a table that opens on a click, thinned to `TABLE_ROWS`
    rows.
    """
    summary = f"<summary>{html.escape(title)}</summary>"
    return f"<details>{summary}{table(header, thinned(rows))}</details>"


def thinned(rows: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Return every n-th row, the last one included, at most `TABLE_ROWS` in all."""
    step = max(1, -(-len(rows) // TABLE_ROWS))
    # Counted from the end, so that the last row, a run's newest values, is always there.
    return rows[::-step][::-1]


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return the lines of a table for a terminal.

    The columns of `left` are flush left, the others flush right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def svg(figure: Any) -> str:
    """Return the figure as HTML: black becomes the page's text colour, light or dark."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    # From the element on: the XML declaration before it is not valid inside HTML.
    text = stream.getvalue()
    element = text[text.index("<svg") :].replace("#000000", "currentColor")
    return f"<figure>{element}</figure>"


def new_figure(width: float, height: float) -> Any:
    """Return an empty matplotlib figure [inches]."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            "pictures need matplotlib: pip install -c constraints.txt -e .[plot]"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def style_axes(axes: Any, title: str) -> Any:
    """Give axes a title and remove their frame; return them."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, which="both")
    return axes


def legend(axes: Any, *, reverse: bool = False) -> None:
    """Draw the legend to the right of the axes."""
    axes.legend(
        fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=reverse
    )
