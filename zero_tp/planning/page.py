"""Write a plan as a page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from zero_tp import page
from zero_tp.planning import pictures, report
from zero_tp.planning.plan import Plan


def write_page(plan: Plan, path: Path, advice: Sequence[str] = ()) -> list[Path]:
    """Write the page of a plan.

    Args:
        advice: lines about other settings, from `report.advice`.

    Returns:
        The files written: the page, then a PNG for each picture.

    Raises:
        UserError: matplotlib is missing, or a file can't be written.
    """
    figures = pictures.of_plan(plan)
    text = "\n".join([report.describe(plan), *advice])
    parts = [f'<p class="{"good" if plan.fits else "bad"}">{html.escape(report.verdict(plan))}</p>']
    parts.append(f"<pre>{html.escape(text)}</pre>")
    parts += [page.svg(figure) for figure in figures.values()]
    title = f"{plan.config.name}: {plan.ranks} × {plan.device.name}"
    return page.write(path, title, parts, figures)
