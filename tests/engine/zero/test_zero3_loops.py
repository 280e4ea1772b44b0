"""ZeRO-3's gathers and reductions as matrices equal DeepSpeed's loops over each rank's part bit for bit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.partition_parameters import AllGatherCoalescedHandle, ZeroParamStatus

from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.base.settings.deepspeed import DeepSpeedSettings, Zero
from zero_tp.engine.zero import zero3_loops as rows
from zero_tp.engine.zero.stages import zero_engine
from zero_tp.parallel.topology import Topology


def sizes_of(seed: int, ranks: int) -> list[int]:
    """Elements of parameters: fewer than ranks, a multiple of them, and any number."""
    chance = random.Random(seed)
    return [1, ranks - 1 or 1, 4 * ranks, *(chance.randrange(1, 200) for _ in range(4))]


def reductions(seed: int) -> int:
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed + rank)
    compared = 0
    drawn = [torch.randn(size, dtype=torch.bfloat16) for size in (*sizes_of(seed, ranks), 0)]
    for tensors in (drawn, drawn[:1], drawn[2:3], [tensor.float() for tensor in drawn], [drawn[3].view(1, -1)]):
        found = rows.reduce_scatter_coalesced([tensor.clone() for tensor in tensors])
        expected = reduce_scatter_coalesced([tensor.clone() for tensor in tensors])
        assert len(found) == len(expected) == len(tensors)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
            compared += 1
    return compared


@pytest.mark.parametrize("world", in_tiers([2, 3, 4], [4]))
def test_reductions_equal_deepspeeds(world: int, ranks: Pools, seed: int) -> None:
    assert ranks(world).run(reductions, seed) == [8 + 1 + 1 + 8 + 1] * world


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_gathers_equal_deepspeeds(ranks: int, seed: int) -> None:
    torch.manual_seed(seed)
    numels = sizes_of(seed, ranks)
    sizes = [-(-numel // ranks) for numel in numels]
    flat = torch.randn(ranks * sum(sizes))

    def gathered(wait: Any) -> list[SimpleNamespace]:
        params = [
            SimpleNamespace(
                ds_status=ZeroParamStatus.INFLIGHT,
                ds_tensor=SimpleNamespace(ds_numel=size, dtype=torch.float64),
                ds_numel=numel,
                ds_shape=(1, numel),
            )
            for numel, size in zip(numels, sizes, strict=True)
        ]
        parts = [flat.narrow(0, rank * sum(sizes), sum(sizes)) for rank in range(ranks)]
        handle = AllGatherCoalescedHandle(SimpleNamespace(wait=lambda: None), params, parts, ranks)
        wait(handle)
        assert handle.complete
        return params

    for ours, theirs in zip(gathered(rows.wait), gathered(rows._original_wait), strict=True):
        assert ours.ds_status == theirs.ds_status == ZeroParamStatus.AVAILABLE
        assert ours.data.dtype == theirs.data.dtype and torch.equal(ours.data, theirs.data)
        assert ours.data.data_ptr() != flat.data_ptr()


@pytest.mark.parametrize("version", [rows.VERSION, "0.19.9"])
def test_stage_3_patches_the_known_version_only(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, scripts and the Trainer all make the stage by `zero_engine`."""
    monkeypatch.setattr(AllGatherCoalescedHandle, "wait", rows._original_wait)
    monkeypatch.setattr(stage3, "reduce_scatter_coalesced", reduce_scatter_coalesced)
    monkeypatch.setattr("deepspeed.__version__", version)
    engine = zero_engine(DeepSpeedSettings(zero_optimization=Zero(stage=3)), Topology())
    known = version == rows.VERSION
    assert (AllGatherCoalescedHandle.wait is rows.wait) == known
    assert (stage3.reduce_scatter_coalesced is rows.reduce_scatter_coalesced) == known
    assert [note.partition(" loops")[0] for note in engine.notes] == ([] if known else ["ZeRO-3: DeepSpeed 0.19.9"])
