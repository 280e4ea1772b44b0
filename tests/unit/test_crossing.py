"""What TP between machines costs, as a run that does it is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zero_tp.config import RunConfig
from zero_tp.parallel import agreement
from zero_tp.planning.forecast import crossing_cost
from zero_tp.planning.plan import device, plan
from zero_tp.topology import Topology

ROOT = Path(__file__).resolve().parents[2]


def test_the_planner_says_what_it_costs() -> None:
    """The first time is that of the links between machines, the second that of the links inside one."""
    config = RunConfig.load(ROOT / "ds_configs" / "gpt2_355m.json", ("zero_tp.parallel.tensor=8",), 16)
    kind = device("h100-80gb")
    said = re.fullmatch(
        r"on h100-80gb the planner expects (\S+) s of TP .* instead of (\S+), (\S+) times the step",
        crossing_cost(config, kind),
    )
    assert said is not None
    across, inside, times = (float(figure) for figure in said.groups())
    assert inside == pytest.approx(plan(config, kind).time.tensor, rel=0.01)  # 8 devices a machine
    assert across > 2 * inside
    assert times > 1.5


def test_machines_are_counted_by_tp_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def machines(tensor: int, hosts: str) -> int:
        ranks = [(rank // tensor, host) for rank, host in enumerate(hosts)]
        monkeypatch.setattr(agreement, "all_gather_object", lambda value: ranks)
        return agreement.most_machines(Topology(tensor, world=len(hosts)))

    assert machines(2, "aabb") == 1
    assert machines(4, "aabb") == 2
    assert machines(2, "abab") == 2
    assert machines(4, "aaaaabcd") == 4
