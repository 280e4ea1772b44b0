"""The loss scale of fp16: DeepSpeed's DynamicLossScaler, updated after the step under every ZeRO
stage.

The loss is multiplied by the scale, so that small gradients do not vanish in fp16. The optimizer
divides the gradients by it (Micikevicius et al., "Mixed Precision Training").

DeepSpeed 0.19.8 updates the scale before it divides by it: when the scale grows, gradients and
clipping are wrong by a factor of 2:

    scale 8       loss · 8, so the gradients are 8 g
    update        the window is full: scale 16
    step          8 g / 16 = g / 2

Without ZeRO it also ignores `hysteresis`. So DeepSpeed's own
update is disabled.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, DynamicLossScaler

STATE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class LossScale:
    """A loss scale that grows after `loss_scale_window` steps without an overflow and halves after
    an overflow.

    Attributes:
        reduced: the last step overflowed and lowered the scale or its remaining `hysteresis`.
    """

    def __init__(self, engine: Any, optimizer: Any):
        self.reduced = False
        self._optimizer = optimizer
        # The optimizers without ZeRO keep their scale in a config without hysteresis; they get the
        # scaler that DeepSpeed makes for ZeRO.
        self._scaler = getattr(optimizer, "loss_scaler", None) or CreateLossScaler(
            torch.half,
            engine.loss_scale(),
            engine.dynamic_loss_scale(),
            engine.dynamic_loss_scale_args(),
        )
        self._scaler.raise_error_at_min_scale = (
            False  # `on_nonfinite` decides whether training stops
        )
        optimizer._update_scale = _no_update

    @property
    def value(self) -> float:
        """Return the factor of the next step's loss."""
        return float(self._scaler.cur_scale)

    def update(self, overflow: bool) -> None:
        """Update the scale after a step, which DeepSpeed skipped if some rank overflowed."""
        # An overflow lowers the hysteresis first, and the scale once the hysteresis is used up.
        before = (self._scaler.cur_scale, getattr(self._scaler, "cur_hysteresis", None))
        self._scaler.update_scale(overflow)
        # Without ZeRO the optimizer divides by a scale of its own, which has to follow the
        # scaler's.
        self._optimizer.loss_scale = self._scaler.cur_scale
        self.reduced = overflow and before != (
            self._scaler.cur_scale,
            getattr(self._scaler, "cur_hysteresis", None),
        )

    def state(self) -> dict[str, Any]:
        """Return the state of a dynamic scale; empty for a fixed one."""
        dynamic = isinstance(self._scaler, DynamicLossScaler)
        return {name: getattr(self._scaler, name) for name in STATE} if dynamic else {}

    def restore(self, saved: dict[str, Any]) -> None:
        """Restore `state()`, unless either scale is fixed or the saved run had another dtype."""
        # A fixed scale saves nothing, and a run in another dtype has no `last_overflow_iter`: the
        # config's initial scale then stays.
        if (
            not isinstance(self._scaler, DynamicLossScaler)
            or saved.get("last_overflow_iter") is None
        ):
            return
        for name in STATE:
            setattr(self._scaler, name, saved.get(name, getattr(self._scaler, name)))
        self._optimizer.loss_scale = self._scaler.cur_scale


def _no_update(overflow: bool) -> None:
    """Stand in for DeepSpeed's update; `LossScale.update` runs after the step."""
