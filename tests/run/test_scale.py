"""The benchmark of a rank's own work in large worlds, at a tiny size."""

from __future__ import annotations

import pytest

from benchmarks.scale import SUMS, asked, simulated, table
from tests.tiers import THOROUGH, in_tiers

CASES = [(0, 1), (9, 3)]


@THOROUGH
@pytest.mark.parametrize(("rank", "stage"), in_tiers(CASES, CASES[:1]))
def test_a_rank_of_a_world_that_does_not_exist(rank: int, stage: int) -> None:
    found = simulated(ranks=16, rank=rank, stage=stage, layers=1, hidden=64, steps=2)
    parts = found["parts"]
    assert all(name in parts for names in SUMS.values() for name in names)
    assert parts["watch: all positions"]["store"] == {"check": 1, "multi_get": 1}
    assert parts["agreement"]["objects"] == 2, "what was read, and the resume point"
    assert parts["resume: what there is"]["opened"]["….safetensors"] == 1, "its own file alone"
    assert parts["step"]["collectives"] > 0 and parts["step"]["groups"] == 0
    leads = parts.get("save: all others' words, the manifest", {"store": {}})["store"]
    assert leads == ({"check": 16, "get": 16, "delete_key": 16} if rank == 0 else {})
    assert 700_000 < found["manifest_bytes"] < 900_000, "the hashes of 96 GB in parts of 8 MiB"
    assert f"16, rank {rank}" in table([found]) and "| watch: all positions | 1 check" in asked(
        found
    )
