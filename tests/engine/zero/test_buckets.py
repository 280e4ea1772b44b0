"""DeepSpeed's bucket of gradients is no larger than all gradients of a rank."""

from __future__ import annotations

import pytest

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.small_engine import build, tokens_of_step
from zero_tp.parallel.topology import Topology


def bucket_of_step(tensor: int, stage: int, size: int | None) -> tuple[int, int, float]:
    """Return the elements of a rank's parameters and of its bucket, and a step's norm."""
    topology: Topology = grid(tensor, False)
    block = {} if size is None else {"reduce_bucket_size": size}
    engine = build(topology, stage, zero_optimization={"stage": stage, **block})
    own = tokens_of_step(0).chunk(topology.data)[topology.data_rank]
    engine.train_step([(part[:, :-1], part[:, 1:]) for part in own.chunk(2)])
    sizes = (getattr(weight, "ds_numel", weight.numel()) for weight in engine.model.parameters())
    return sum(sizes), engine.zero.optimizer.reduce_bucket_size, engine.gradient_norm


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_bucket_holds_all_gradients_at_most(ranks: Pools, stage: int) -> None:
    default, small = (ranks(2).run(bucket_of_step, 1, stage, size) for size in (None, 1000))
    for (total, size, norm), (_, smaller, same) in zip(default, small, strict=True):
        assert (size, smaller) == (total, 1000)
        assert norm == pytest.approx(same, rel=1e-6)
