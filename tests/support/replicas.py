"""Replicas of a small model that trains: the engine and the rows that the tests of its guards share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config

from zero_tp.topology import Topology


def settings_of(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    if dtype.startswith("bf16"):
        settings["bf16"] = {"enabled": True}
    if dtype == "bf16_fp32_accumulation":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    return settings


def replica(stage: int, dtype: str = "fp32", tensor: int = 1, **options: Any) -> Any:
    """An engine with dropout on TP `tensor`, and the rest of the ranks for DP."""
    from zero_tp.training.engine import TrainingEngine

    config = GPT2Config(n_layer=1, n_embd=24, n_head=4, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0)
    return TrainingEngine(config, Topology(tensor, tensor > 1), settings_of(stage, dtype), seed=1, **options)


def rows(engine: Any, step: int = 0) -> list[Any]:
    tokens = (torch.arange(18).reshape(2, 9) * (step + 1) + 7 * engine.topology.data_rank) % 50
    return [(tokens[:, :-1], tokens[:, 1:])]
