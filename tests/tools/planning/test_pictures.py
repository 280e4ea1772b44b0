"""A plan's page needs no network, and its picture shows the peak and the limit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.plan_configs import load
from tests.support.plans import plan_gpt2
from tests.tiers import THOROUGH
from zero_tp.base.constants import GIB
from zero_tp.base.page import TABLE_ROWS
from zero_tp.tools.planning import pictures
from zero_tp.tools.planning import plan_report as report
from zero_tp.tools.planning.memory import rank_memory
from zero_tp.tools.planning.pictures import memory_over_time, write_page
from zero_tp.tools.planning.plan_settings import workload_of
from zero_tp.tools.planning.search import Search


@THOROUGH
def test_a_page_that_needs_no_network(tmp_path: Path) -> None:
    planned = plan_gpt2()
    search = Search(planned.config, planned.device)
    shown, _ = search.fastest((), 3)
    page, picture = write_page(
        planned, tmp_path / "plan.html", report.search_lines(search, shown, planned), shown[0]
    )
    text = page.read_text()
    assert picture.suffix == ".png" and picture.read_bytes()[:4] == b"\x89PNG"
    links = set(re.findall(r"(?:src|href)\s*=\s*\"([^\"]*)\"", text))
    assert not [link for link in links if not link.startswith("#")], (
        "only references inside the page"
    )
    assert "@import" not in text and "<script" not in text
    assert text.count("<svg") == 1 and all(one.describe() in text for one in shown)
    assert [title for title in re.findall(r"<summary>(.*?)</summary>", text)] == [
        "the present settings [GiB]",
        "the fastest settings [GiB]",
    ]
    (table,) = re.findall(r"<summary>the present settings.*?</table>", text)
    assert (
        f"<td>{planned.peak.total / GIB:.4g}</td>" in table
        and table.count("<tr>") <= TABLE_ROWS + 1
    )


def test_a_picture_shows_below_which_size_tensors_fit_with_margins() -> None:
    """Beside another settings' picture, on one scale."""
    planned = plan_gpt2()
    full = replace(
        planned, device=planned.device.model_copy(update={"memory_gib": planned.needed / GIB})
    )
    assert (
        full.usable == pytest.approx(planned.peak.total)
        and full.usable < full.device.memory_gib * GIB
    )
    points = planned.memory.points
    first, second, third = memory_over_time(
        {
            "full": (points, full.usable),
            "present": (points, planned.usable),
            "unknown": (points, None),
        }
    ).axes
    assert [line.get_ydata()[0] for line in first.lines if line.get_linestyle() == "--"] == [
        full.usable / GIB
    ]
    assert not [
        line for axes in (second, third) for line in axes.lines if line.get_linestyle() == "--"
    ], "far above"
    assert first.get_ylim() == second.get_ylim() == third.get_ylim()
    assert second.get_xlabel().endswith(f"limit {planned.usable / GIB:.4g} GiB")


def test_a_picture_keeps_the_ends_of_phases_and_the_peak() -> None:
    config = load(["zero_tp.model.n_layer=7"])
    points = rank_memory(config, workload_of(config, cpu=False)).points
    shown = pictures._downsampled(points, 20)
    assert len(shown) < len(points) / 3
    assert max(one.total for one in shown) == max(one.total for one in points)
    assert shown[-3:] == points[-3:], "the end of backward, the step, and what stays after it"
