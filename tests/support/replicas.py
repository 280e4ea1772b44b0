"""Replicas of a small model that trains: the engine and the rows that the tests of its guards share."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.settings import deepspeed_settings, gpt2_config
from zero_tp.topology import Topology


def settings_of(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}}
    return deepspeed_settings(stage, micro_batch=2, dtype=dtype, lr=1e-2, scheduler=scheduler)


def replica(stage: int, dtype: str = "fp32", tensor: int = 1, **options: Any) -> Any:
    """An engine with dropout on TP `tensor`, and the rest of the ranks for DP."""
    from zero_tp.training.engine import TrainingEngine

    config = gpt2_config(0.1, n_layer=1, vocab_size=50, n_positions=8)
    return TrainingEngine(config, Topology(tensor, tensor > 1), settings_of(stage, dtype), seed=1, **options)


def rows(engine: Any, step: int = 0) -> list[Any]:
    tokens = (torch.arange(18).reshape(2, 9) * (step + 1) + 7 * engine.topology.data_rank) % 50
    return [(tokens[:, :-1], tokens[:, 1:])]
