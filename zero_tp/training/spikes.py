"""Find steps whose loss or gradient norm is a spike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.config.schema import Spike


class SpikeBound:
    """A bound on loss and gradient norm that follows the last steps, as in OLMo-core's skip-step optimizer.

    A step is a spike if its loss or norm is more than so many standard deviations above the mean of the steps in the
    window. Spikes enter the window too: a new level soon stops being one. It judges once the window is half
    full.

    Attributes:
        reason: why the last step was a spike; else empty.
    """

    def __init__(self, settings: Spike, recent: list[list[float]]):
        """Take `recent`, [loss, norm] of the last steps, and keep it up to date: it is saved in checkpoints."""
        self.settings, self.recent, self.reason = settings, recent, ""

    def exceeded_on_rank_zero(self, loss: Tensor, norm: Tensor) -> bool:
        """Judge a step by rank 0's numbers, on all ranks. Broadcast of two numbers, which are read at once.

        DeepSpeed skips a step whose numbers are not finite; some of its norms are -1 then.
        """
        numbers = torch.stack([loss, norm.to(loss)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(numbers, 0)
        loss_value, norm_value = numbers.tolist()
        if not math.isfinite(loss_value) or not math.isfinite(norm_value) or norm_value < 0:
            return False
        return self.exceeded(loss_value, norm_value)

    def exceeded(self, loss: float, norm: float) -> bool:
        """Return whether a step of this finite loss and norm is a spike; add it to the window."""
        self.reason = ""
        if len(self.recent) >= max(2, self.settings.window // 2):
            losses, norms = zip(*self.recent, strict=True)
            self.reason = _describe_spike("loss", loss, self.settings.loss, losses) or _describe_spike(
                "gradient norm", norm, self.settings.grad_norm, norms
            )
        self.recent.append([loss, norm])
        del self.recent[: -self.settings.window]
        return bool(self.reason)


def _describe_spike(name: str, value: float, limit: float | None, before: Sequence[float]) -> str:
    """Return why a value is more than `limit` standard deviations above those before; "" if it is not."""
    mean, deviation = statistics.fmean(before), statistics.stdev(before)
    if limit is None or value - mean <= limit * deviation:
        return ""
    return (
        f"its {name} {value:.4g} is above {mean + limit * deviation:.4g}, {limit:g} standard deviations over the mean "
        f"of the {len(before)} steps before"
    )
