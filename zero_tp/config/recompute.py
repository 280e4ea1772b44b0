"""The sums of recomputation: layers, micro-batches and places for checkpoints."""

from __future__ import annotations

from typing import Any

from zero_tp.config.schema import ZeroTP
from zero_tp.errors import ConfigError

KEY = "zero_tp.recompute"


def check_recompute(config: dict[str, Any], zero_tp: ZeroTP, layers: int, accumulation: int | None) -> None:
    """
    Args:
        config: DeepSpeed's part of the config.
        layers: of the model.
        accumulation: micro-batches of a step, or None when it isn't known yet.

    Raises:
        ConfigError: the policy chooses layers or micro-batches that are not there, or leaves too few places for
            checkpoints.
    """
    policy = zero_tp.recompute_policy
    for name in ("layers", "every"):
        value = getattr(policy, name)
        if value is not None and value > layers:
            raise ConfigError(f"{KEY}.{name}", f"{value}, but the model has {layers} layers", f"use at most {layers}")
    if policy.keep_micro_batches and accumulation is not None and policy.keep_micro_batches >= accumulation:
        kept = policy.keep_micro_batches
        problem = f"{kept} of the {accumulation} micro-batches of a step, so nothing would be recomputed"
        remedy = f"use at most {accumulation - 1}" if accumulation > 1 else "leave it out"
        raise ConfigError(f"{KEY}.keep_micro_batches", problem, remedy)
    settings = config.get("activation_checkpointing", {})
    places, needed = settings.get("number_checkpoints"), len(policy.recomputed_layers(layers))
    if settings.get("contiguous_memory_optimization") and places is not None and places < needed:
        problem = f"{places}, but {needed} layers keep a checkpoint each"
        key = "activation_checkpointing.number_checkpoints"
        raise ConfigError(key, problem, f"use {needed}, or leave it out")
