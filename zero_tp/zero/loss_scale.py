"""The loss scale of fp16 follows one rule under every ZeRO stage: that of DeepSpeed's DynamicLossScaler.

The loss is multiplied by the scale, so that small gradients do not vanish in fp16, and the gradients are divided by it
before the optimizer uses them (Micikevicius et al., "Mixed Precision Training").

In DeepSpeed 0.19.8 an optimizer updates the scale before it divides by it. At the step where the scale grows, gradients
and clipping are then wrong by the factor of 2. Without ZeRO it ignores `hysteresis` besides. So its own update is taken
out, and the scale is updated here once the step is done.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler

STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """A loss scale that grows after `loss_scale_window` steps without an overflow and halves after an overflow.

    Attributes:
        reduced: the last step overflowed, and the scale became smaller for it or will soon (`hysteresis`).
    """

    def __init__(self, engine: Any, optimizer: Any):
        """Take over the scale of DeepSpeed's `optimizer`, which `engine` has made."""
        self.reduced = False
        self._optimizer = optimizer
        self._scaler = getattr(optimizer, "loss_scaler", None) or CreateLossScaler(
            torch.half, engine.loss_scale(), engine.dynamic_loss_scale(), engine.dynamic_loss_scale_args()
        )
        self._scaler.raise_error_at_min_scale = False  # the run judges what it means
        optimizer._update_scale = _later

    @property
    def value(self) -> float:
        """Return what the next step's loss is multiplied by."""
        return float(self._scaler.cur_scale)

    def update(self, overflow: bool) -> None:
        """Follow a step that is done: it overflowed on some rank and was skipped, or not."""
        before = (self._scaler.cur_scale, getattr(self._scaler, "cur_hysteresis", None))
        self._scaler.update_scale(overflow)
        self._optimizer.loss_scale = self._scaler.cur_scale
        self.reduced = overflow and before != (self._scaler.cur_scale, getattr(self._scaler, "cur_hysteresis", None))

    def state(self) -> dict[str, Any]:
        """Return the scale, and what decides when it changes next; empty for one that never does."""
        dynamic = isinstance(self._scaler, DynamicLossScaler)
        return {name: getattr(self._scaler, name) for name in STATE} if dynamic else {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Bring the scale to what `state` gave; a run of another dtype, or whose scale never changes, gave nothing."""
        if not isinstance(self._scaler, DynamicLossScaler) or saved.get("last_overflow_iter") is None:
            return
        for name in STATE:
            setattr(self._scaler, name, saved.get(name, getattr(self._scaler, name)))
        self._optimizer.loss_scale = self._scaler.cur_scale


def _later(overflow: bool) -> None:
    """Do nothing in place of DeepSpeed's update: `LossScale.update` comes after the step."""
