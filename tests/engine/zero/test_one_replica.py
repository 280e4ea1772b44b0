"""With one replica no gradient is copied to a bucket: the mean over it is the gradient itself."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from zero_tp.parallel.topology import Topology


def reduced_buckets(tensor: int, stage: int, dtype: str) -> int:
    """Return how many buckets of gradients DeepSpeed's engine reduces in a step."""
    topology: Topology = grid(tensor, False)
    engine = build(topology, stage, dtype=dtype)
    deepspeed_engine: Any = engine.deepspeed_engine
    reduce, buckets = deepspeed_engine.allreduce_bucket, []

    def counted(*arguments: Any) -> Any:
        buckets.append(arguments)
        return reduce(*arguments)

    deepspeed_engine.allreduce_bucket = counted
    own = tokens_of_step(0).chunk(topology.data)[topology.data_rank]
    engine.train_step([(part[:, :-1], part[:, 1:]) for part in own.chunk(ACCUMULATION)])
    return len(buckets)


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (0, "bf16"), (1, "bf16_fp32_accumulation")]
)
def test_one_replica_reduces_nothing(ranks: Pools, stage: int, dtype: str) -> None:
    assert ranks(2).run(reduced_buckets, 2, stage, dtype) == [0, 0]
    assert ranks(2).run(reduced_buckets, 1, stage, dtype) == [1, 1]
