"""ZeRO-0 with one replica copies no gradient to a bucket: the mean over it is the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from zero_tp.parallel.topology import Topology

EACH_DTYPE = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def train(engine: Any, topology: Topology, steps: int) -> None:
    for step in range(steps):
        own = tokens_of_step(step).chunk(topology.data)[topology.data_rank]
        engine.train_step([(part[:, :-1], part[:, 1:]) for part in own.chunk(ACCUMULATION)])


def reduced_buckets(tensor: int, dtype: str) -> int:
    """Return how many buckets of gradients DeepSpeed's engine reduces in a step."""
    topology: Topology = grid(tensor, False)
    engine = build(topology, 0, dtype=dtype)
    reduce, buckets = engine.deepspeed_engine.allreduce_bucket, list[Any]()

    def counted(*arguments: Any) -> Any:
        buckets.append(arguments)
        return reduce(*arguments)

    engine.deepspeed_engine.allreduce_bucket = counted
    train(engine, topology, 1)
    return len(buckets)


@EACH_DTYPE
def test_one_replica_reduces_nothing(ranks: Pools, dtype: str) -> None:
    assert ranks(2).run(reduced_buckets, 2, dtype) == [0, 0]
    assert ranks(2).run(reduced_buckets, 1, dtype) == [1, 1]


def weights_after_two_steps(dtype: str, own: bool) -> dict[str, Tensor]:
    """Return a rank's weights.

    Args:
        own: DeepSpeed reduces the gradients, over one replica.
    """
    topology: Topology = grid(2, False)
    engine = build(topology, 0, dtype=dtype)
    if own:
        del engine.deepspeed_engine.allreduce_no_retain  # the class's own comes back
    train(engine, topology, 2)
    return {name: weight.detach().clone() for name, weight in engine.model.named_parameters()}


@EACH_DTYPE
def test_the_weights_are_those_of_a_reduction(ranks: Pools, dtype: str) -> None:
    ours, theirs = (ranks(2).run(weights_after_two_steps, dtype, own) for own in (False, True))
    for found, expected in zip(ours, theirs, strict=True):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
