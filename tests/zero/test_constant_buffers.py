"""C_B: DeepSpeed's buffers have the sizes that the JSON gives, whatever the model's (arXiv 1910.02054, section 6.2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pools import Pools

REDUCE, GATHER = 6_000, 4_000
PREFETCH, LIVE, REUSE, PERSISTENT = 3_000, 7_000, 5_000, 50

MODEL: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_head": 4,
    "n_positions": 16,
    "vocab_size": 101,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def write_config(path: Path, layers: int, stage: int, overlap: bool) -> Path:
    of_stage_3 = {
        "stage3_prefetch_bucket_size": PREFETCH,
        "stage3_max_live_parameters": LIVE,
        "stage3_max_reuse_distance": REUSE,
        "stage3_param_persistence_threshold": PERSISTENT,
    }
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": overlap,
            "reduce_bucket_size": REDUCE,
            "allgather_bucket_size": GATHER,
            **(of_stage_3 if stage == 3 else {}),
        },
        "zero_tp": {
            "model": {**MODEL, "n_layer": layers},
            "parallel": {"tensor": 2},
            "data": {"train": "nowhere/train", "sequence_length": 16},
            "training": {"steps": 1},
        },
    }
    path.write_text(json.dumps(config))
    return path


def buffers(path: str) -> dict[str, Any]:
    """The sizes that DeepSpeed's optimizer has, and those of its buckets while gradients arrive, in elements."""
    from zero_tp.config import RunConfig
    from zero_tp.topology import Topology
    from zero_tp.training.engine import TrainingEngine

    config = RunConfig.load(path, world_size=dist.get_world_size())
    topology = Topology(2, True)
    engine = TrainingEngine(config.hf_config(), topology, config.deepspeed_config(), seed=1)
    optimizer: Any = engine.zero.optimizer
    sizes: set[tuple[int, ...]] = set()
    filled: list[int] = []

    def look(gradient: torch.Tensor) -> None:
        for bucket in optimizer.ipg_buckets.values():
            made = bucket.buffer if isinstance(bucket.buffer, list) else [bucket.buffer]
            if made:  # ZeRO-1 and -2 make theirs when the first gradient of a step has arrived
                sizes.add(tuple(buffer.numel() for buffer in made))
            filled.append(bucket.elements)

    if engine.engine.zero_optimization_stage() < 3:  # ZeRO-1 fills its buckets after backward; both reduce them here
        average = optimizer.average_tensor

        def look_and_average(bucket: torch.Tensor, *arguments: Any) -> None:
            filled.append(bucket.numel())
            average(bucket, *arguments)

        optimizer.average_tensor = look_and_average
    parameters = list(engine.model.parameters())
    for parameter in parameters:
        parameter.register_hook(look)
    tokens = torch.randint(MODEL["vocab_size"], (2, 16))
    engine.train_step([(tokens, tokens)])
    found: dict[str, Any] = {
        "parameters": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters),
        "largest": max(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters),
        "reduce": optimizer.reduce_bucket_size,
        "buffers": sizes,
        "filled": max(filled),
    }
    if engine.engine.zero_optimization_stage() < 3:
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
@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_buffers_do_not_grow_with_the_model(ranks: Pools, tmp_path: Path, stage: int, overlap: bool) -> None:
    small, large = (
        ranks(4).run(buffers, str(write_config(tmp_path / f"{layers}.json", layers, stage, overlap)))
        for layers in (1, 6)
    )
    # ZeRO-1 and -2 fill one bucket while they reduce the other when communication overlaps.
    expected = {(REDUCE,) * (2 if overlap and stage < 3 else 1)}
    for found in (*small, *large):
        assert found["largest"] < REDUCE < found["parameters"]
        assert found["reduce"] == REDUCE and found["buffers"] == expected
        assert REDUCE / 2 < found["filled"] <= REDUCE, "the bucket is not what is reduced"
        if stage < 3:
            assert found["gather"] == GATHER
        else:
            assert [found[name] for name in ("prefetch", "live", "reuse", "persistent")] == [
                PREFETCH,
                LIVE,
                REUSE,
                PERSISTENT,
            ]
    assert all(more["parameters"] > 3 * less["parameters"] for less, more in zip(small, large, strict=True))
