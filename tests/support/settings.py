"""Engines of the tests: DeepSpeed's settings, the config of a small GPT-2, and replicas that
train.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from transformers import GPT2Config

from tests.support.compare import grid
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig


def deepspeed_settings(
    stage: int,
    *,
    micro_batch: int = 1,
    accumulation: int = 1,
    dtype: str = "fp32",
    lr: float = 1e-3,
    **changes: Any,
) -> dict[str, Any]:
    """Return DeepSpeed's config with torch's AdamW, and whole blocks of it changed.

    Args:
        dtype: "fp32", "bf16", "bf16_fp32_accumulation" (bf16 with gradients summed in fp32) or
            "fp16" (scale 16).
    """
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if dtype.startswith("bf16"):
        settings["bf16"] = {"enabled": True}
    if dtype == "bf16_fp32_accumulation":
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}
    return settings | changes


def gpt2_config(dropout: float = 0.0, **changes: Any) -> GPT2Config:
    """Return the config of a GPT-2 of 2 layers, 4 heads, hidden 24, 24 positions and 61 tokens,
    changed.
    """
    sizes: dict[str, Any] = {
        "n_layer": 2,
        "n_head": 4,
        "n_embd": 24,
        "n_positions": 24,
        "vocab_size": 61,
    }
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2Config(
        **{
            **sizes,
            **ids,
            **dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), dropout),
            **changes,
        }
    )


def engine_of(config: RunConfig, **options: Any) -> Any:
    """Return a rank's engine of a run's config, with the weights that it names or draws."""
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.model.weights.load import PretrainedSource

    run, hf_config = config.zero_tp, config.hf_config()
    if config.pretrained is not None:
        options.setdefault("source", PretrainedSource(config.pretrained, hf_config))
    topology = grid(run.parallel.tensor, run.parallel.sequence, run.parallel.expert)
    options = {
        "seed": run.training.seed,
        "param_groups": run.param_groups,
        "router_bias_update_rate": run.training.router_bias_update_rate,
        "ema": None if run.training.ema is None else run.training.ema.decay,
        "z_loss": run.training.z_loss,
        "router_z_loss": run.training.router_z_loss,
        **options,
    }
    return TrainingEngine(hf_config, topology, config.engine_settings, **options)


@contextlib.contextmanager
def fp16_supported() -> Iterator[None]:
    """DeepSpeed's CPU accelerator reports fp16 as unsupported because it is slow; inside the
    block it is supported.
    """
    from deepspeed.accelerator import get_accelerator

    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", lambda self: True):
        yield


# ---- replicas, for the tests of their guards -----------------------------------------------------


def settings_of(stage: int, dtype: str = "fp32") -> dict[str, Any]:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 1e-2}}
    return deepspeed_settings(stage, micro_batch=2, dtype=dtype, lr=1e-2, scheduler=scheduler)


def replica(stage: int, dtype: str = "fp32", tensor: int = 1, **options: Any) -> Any:
    """An engine with dropout on TP `tensor`, and the rest of the ranks for DP."""
    from zero_tp.engine.engine import TrainingEngine

    config = gpt2_config(0.1, n_layer=1, vocab_size=50, n_positions=8)
    return TrainingEngine.from_dict(
        config, Topology(tensor, tensor > 1), settings_of(stage, dtype), seed=1, **options
    )


def rows(engine: Any, step: int = 0) -> list[Any]:
    tokens = (torch.arange(18).reshape(2, 9) * (step + 1) + 7 * engine.topology.data_rank) % 50
    return [(tokens[:, :-1], tokens[:, 1:])]
