"""Write pictures as one HTML page in which nothing comes from a network, and the same as PNG beside it."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_tp.constants import GIB
from zero_tp.errors import UserError
from zero_tp.files import write_atomically
from zero_tp.planning import pictures, report
from zero_tp.planning.plan import Plan
from zero_tp.planning.search import Candidate, Search

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
pre { background: #f5f5f5; padding: .8rem 1rem; overflow-x: auto; font-size: 13px; }
figure { margin: 1.2rem 0; } figure svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; } td, th { padding: .25rem .7rem; text-align: right; }
td:last-child, th:last-child { text-align: left; } tr:nth-child(even) td { background: #f5f5f5; }
.good { color: #176117; } .bad { color: #a11; }
"""


def write_page(plan: Plan, path: Path, search: Search | None, shown: Sequence[Candidate]) -> list[Path]:
    """Write the page of a plan.

    Args:
        search, shown: a search and its fastest, if there was one.

    Returns:
        The files written: the page, then a PNG for each picture.

    Raises:
        UserError: matplotlib is missing, or a file can't be written.
    """
    figures = pictures.of_plan(plan)
    parts = [f'<p class="{"good" if plan.fits else "bad"}">{html.escape(report.verdict(plan))}</p>']
    parts.append(f"<pre>{html.escape(report.describe(plan))}</pre>")
    parts += [svg(figure) for figure in figures.values()]
    if search is not None:
        parts.append("<h2>Other settings, the fastest that fit</h2>")
        parts.append(f"<p>By formulas {search.fitting} of {len(search.ranked)} fit; times are an estimate.</p>")
        parts.append(_table(plan, shown))
    title = f"{plan.config.name}: {plan.ranks} × {plan.device.name}"
    return write(path, title, parts, figures)


def write(path: Path, title: str, parts: Sequence[str], figures: Mapping[str, Any]) -> list[Path]:
    """Write a page and its figures as PNG beside it: OUT.html, OUT_memory.png, …

    Raises:
        UserError: a file can't be written.
    """
    text = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    written = [path]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
        for name, figure in figures.items():
            picture = path.with_name(f"{path.stem}_{name}.png")
            figure.savefig(picture, dpi=150)
            written.append(picture)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror}); give another path") from None
    return written


def svg(figure: Any) -> str:
    """Return the figure as an element of the page."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def _table(plan: Plan, shown: Sequence[Candidate]) -> str:
    rows = ["<tr><th></th><th>s a step</th><th>tokens/s</th><th>GiB</th><th>settings</th></tr>"]
    for number, one in enumerate(shown, start=1):
        rows.append(
            f"<tr><td>{number}</td><td>{one.time.total:.3f}</td><td>{plan.tokens / one.time.total:,.0f}</td>"
            f"<td>{one.needed / GIB:.1f}</td><td>{html.escape(one.choice.describe())}</td></tr>"
        )
    return f"<table>{''.join(rows)}</table>"
