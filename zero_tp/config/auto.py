"""`"auto"`, Hugging Face's word for a value that the run decides. DeepSpeed itself doesn't know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Known:
    """What "auto" is worked out from: the config, the run's steps, and the model's hidden size."""

    config: dict[str, Any]
    steps: int
    hidden_size: int


def look_up(config: Any, path: str) -> Any:
    """The value at a dotted path, or None where the path leads nowhere."""
    for part in path.split("."):
        if not isinstance(config, dict) or part not in config:
            return None
        config = config[part]
    return config


AUTO: dict[str, tuple[str, Callable[[Known], Any]]] = {
    "gradient_clipping": ("1.0", lambda known: 1.0),
    "fp16.enabled": ("false", lambda known: False),
    "bf16.enabled": ("true unless fp16 is enabled", lambda known: look_up(known.config, "fp16.enabled") is not True),
    "optimizer.params.betas": ("[0.9, 0.999]", lambda known: [0.9, 0.999]),
    "optimizer.params.eps": ("1e-8", lambda known: 1e-8),
    "optimizer.params.weight_decay": ("0.0", lambda known: 0.0),
    "scheduler.params.total_num_steps": ("`zero_tp.training.steps` of the first start", lambda known: known.steps),
    "scheduler.params.warmup_num_steps": (
        "1 % of `total_num_steps`, at least 1, as of the first start",
        lambda known: max(
            1, int(_number(look_up(known.config, "scheduler.params.total_num_steps"), known.steps)) // 100
        ),
    ),
    "scheduler.params.warmup_min_lr": ("0.0", lambda known: 0.0),
    "scheduler.params.warmup_max_lr": (
        "`optimizer.params.lr`",
        lambda known: look_up(known.config, "optimizer.params.lr"),
    ),
    "zero_optimization.reduce_bucket_size": ("hidden²", lambda known: known.hidden_size**2),
    "zero_optimization.stage3_prefetch_bucket_size": ("0.9 × hidden²", lambda known: known.hidden_size**2 * 9 // 10),
    "zero_optimization.stage3_param_persistence_threshold": ("10 × hidden", lambda known: 10 * known.hidden_size),
}
"""Keys that may be "auto" beside the three batch sizes: what it means, and how it is worked out, in this order."""

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

FROZEN = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
"""Decided at the run's first start, so that a longer run doesn't bend the schedule that it is in."""


def resolve_auto(config: dict[str, Any], steps: int, hidden_size: int, frozen: dict[str, Any] | None = None) -> None:
    """Replace each "auto" of AUTO in `config`; an "auto" batch size is dropped, to be worked out from the others.

    Args:
        config: the file's object; changed in place.
        steps: `zero_tp.training.steps`.
        hidden_size: of the model.
        frozen: the resolved config of the run's first start, if this is a later one.
    """
    for key in BATCH_KEYS:
        if config.get(key) == "auto":
            del config[key]
    known = Known(config, steps, hidden_size)
    for path, (_, value) in AUTO.items():
        *blocks, name = path.split(".")
        block = look_up(config, ".".join(blocks)) if blocks else config
        if isinstance(block, dict) and block.get(name) == "auto":
            earlier = look_up(frozen, path) if path in FROZEN else None
            block[name] = value(known) if earlier is None else earlier


def _number(value: Any, otherwise: int) -> float:
    return value if isinstance(value, (int, float)) else otherwise
