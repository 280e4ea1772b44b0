"""A plan is written as a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from zero_tp import page
from zero_tp.constants import GIB
from zero_tp.planning import pictures, report
from zero_tp.planning.plan import Plan
from zero_tp.planning.search import Candidate, Search


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
    parts += [page.svg(figure) for figure in figures.values()]
    if search is not None:
        parts.append("<h2>Other settings, the fastest that fit</h2>")
        parts.append(f"<p>By formulas {search.fitting} of {len(search.ranked)} fit; times are an estimate.</p>")
        parts.append(_table(plan, shown))
    title = f"{plan.config.name}: {plan.ranks} × {plan.device.name}"
    return page.write(path, title, parts, figures)


def _table(plan: Plan, shown: Sequence[Candidate]) -> str:
    rows = [
        (
            f"{number}",
            f"{one.time.total:.3f}",
            f"{plan.tokens / one.time.total:,.0f}",
            f"{one.needed / GIB:.1f}",
            one.choice.describe(),
        )
        for number, one in enumerate(shown, start=1)
    ]
    return page.table(("", "s a step", "tokens/s", "GiB", "settings"), rows)
