"""transformers' Trainer without a model, and its DeepSpeed plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class PlainTrainer:
    """transformers' Trainer, as far as it keeps what a script gives."""

    optimizer = lr_scheduler = compute_loss_func = None

    def __init__(self, model: Any, args: Any, **options: Any) -> None:
        self.model, self.args = model, args
        vars(self).update(options)


BATCH = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
}


def plugin_of(config: dict[str, Any]) -> Any:
    """Return accelerate's plugin, as far as it is asked."""
    return SimpleNamespace(deepspeed_config=config, deepspeed_config_process=lambda **_: None)
