"""How many machines the ranks of a TP group are on."""

from __future__ import annotations

import pytest

from zero_tp.parallel import agreement
from zero_tp.topology import Topology


def test_machines_are_counted_by_tp_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def machines(tensor: int, hosts: str) -> int:
        ranks = [(rank // tensor, host) for rank, host in enumerate(hosts)]
        monkeypatch.setattr(agreement, "all_gather_object", lambda value: ranks)
        return agreement.most_machines(Topology(tensor, world=len(hosts)))

    assert machines(2, "aabb") == 1
    assert machines(4, "aabb") == 2
    assert machines(2, "abab") == 2
    assert machines(4, "aaaaabcd") == 4
