"""C_B: the config, not the model, sets the sizes of DeepSpeed's buffers (arXiv 1910.02054,
section 6.2).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from benchmarks.papers.engines import drawn, engine_of, small_config
from tests.support.pools import Pools

REDUCE, GATHER = 6_000, 4_000
PREFETCH, LIVE, REUSE, PERSISTENT = 3_000, 7_000, 5_000, 50

SIZES = {"n_embd": 32, "n_head": 4, "vocab_size": 101, "n_positions": 16}
MODEL = (
    *(f"zero_tp.model.{name}={size}" for name, size in SIZES.items()),
    "zero_tp.data.sequence_length=16",
)
SETTINGS = {
    "reduce_bucket_size": REDUCE,
    "allgather_bucket_size": GATHER,
    "stage3_prefetch_bucket_size": PREFETCH,
    "stage3_max_live_parameters": LIVE,
    "stage3_max_reuse_distance": REUSE,
    "stage3_param_persistence_threshold": PERSISTENT,
}


def buffers(layers: int, stage: int, overlap: bool) -> dict[str, Any]:
    """Return the sizes of DeepSpeed's optimizer, and of its buckets during backward, in
    elements.
    """
    keys = {**SETTINGS, "stage": stage, "overlap_comm": overlap}
    zero = [f"zero_optimization.{key}={json.dumps(value)}" for key, value in keys.items()]
    config = small_config(
        4, *MODEL, f"zero_tp.model.n_layer={layers}", "zero_tp.parallel.tensor=2", *zero
    )
    engine = engine_of(config)
    optimizer: Any = engine.zero.optimizer
    sizes: set[tuple[int, ...]] = set()
    filled: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        for bucket in optimizer.ipg_buckets.values():
            made = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            if made:  # ZeRO-1 and -2 make theirs when the first gradient of a step has arrived
                sizes.add(tuple(buffer.numel() for buffer in made))
            filled.append(bucket.elements)

    # ZeRO-1 fills its buckets after backward; both reduce them here.
    if engine.deepspeed_engine.zero_optimization_stage() < 3:
        average = optimizer.average_tensor

        def look_and_average(bucket: torch.Tensor, *arguments: Any) -> None:
            filled.append(bucket.numel())
            average(bucket, *arguments)

        optimizer.average_tensor = look_and_average
    parameters = list(engine.model.parameters())
    for parameter in parameters:
        parameter.register_hook(look)
    engine.train_step(drawn(config))
    found: dict[str, Any] = {
        "parameters": sum(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters
        ),
        "largest": max(
            getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters
        ),
        "reduce": optimizer.reduce_bucket_size,
        "buffers": sizes,
        "filled": max(filled),
    }
    if engine.deepspeed_engine.zero_optimization_stage() < 3:
        return found | {"gather": optimizer.allgather_bucket_size}
    offload = optimizer.parameter_offload
    coordinator = offload.get_param_coordinator()
    return found | {
        "prefetch": coordinator._PartitionedParameterCoordinator__prefetch_bucket_sz,
        "live": offload._max_available_parameters_in_numel,
        "reuse": coordinator._PartitionedParameterCoordinator__max_reuse_dist_in_numel,
        "persistent": offload.param_numel_persistence_threshold,
    }


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "overlap"), [(1, False), (2, False), (2, True), (3, False), (3, True)]
)
def test_buffers_do_not_grow_with_the_model(ranks: Pools, stage: int, overlap: bool) -> None:
    small, large = (ranks(4).run(buffers, layers, stage, overlap) for layers in (1, 6))
    # ZeRO-1 and -2 fill one bucket while they reduce the other when communication overlaps.
    expected = {(REDUCE,) * (2 if overlap and stage < 3 else 1)}
    for found in (*small, *large):
        assert found["largest"] < REDUCE < found["parameters"]
        assert found["reduce"] == REDUCE and found["buffers"] == expected
        assert REDUCE / 2 < found["filled"] <= REDUCE, "the bucket is not what is reduced"
        if stage < 3:
            assert found["gather"] == GATHER
        else:
            sizes = {"prefetch": PREFETCH, "live": LIVE, "reuse": REUSE, "persistent": PERSISTENT}
            assert sizes.items() <= found.items()
    assert all(
        more["parameters"] > 3 * less["parameters"] for less, more in zip(small, large, strict=True)
    )
