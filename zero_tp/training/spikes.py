"""Find steps whose loss or gradient norm is a spike."""

from __future__ import annotations

import math
import statistics

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.config.schema import Spike


class SpikeBound:
    """A bound on loss and gradient norm follows the last steps, as OLMo-core's skip-step optimizer has it.

    A step is a spike when its loss or norm is more than so many standard deviations above the mean of the steps in the
    window. The window takes spikes in too, so that a new level is soon no spike; it judges when it is half full.

    Attributes:
        told: what the last spike was, in words.
    """

    def __init__(self, settings: Spike, recent: list[list[float]]):
        """Take `recent`, [loss, norm] of the last steps, which is kept up to date: it goes with a checkpoint."""
        self.settings, self.recent, self.told = settings, recent, ""

    def exceeded_on_rank_zero(self, loss: Tensor, norm: Tensor) -> bool:
        """Judge a step by rank 0's numbers, on all ranks alike. Broadcast of two numbers, which are read at once.

        DeepSpeed skips a step whose numbers are not finite; it says -1 for some norms that are not.
        """
        numbers = torch.stack([loss, norm.to(loss)])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(numbers, 0)
        judged, of_norm = numbers.tolist()
        return math.isfinite(judged) and math.isfinite(of_norm) and of_norm >= 0 and self.exceeded(judged, of_norm)

    def exceeded(self, loss: float, norm: float) -> bool:
        """Tell whether a step of this finite loss and norm is a spike, and remember it."""
        limits = (self.settings.loss, self.settings.grad_norm)
        self.told = ""
        if len(self.recent) >= max(2, self.settings.window // 2):
            for name, value, limit, before in zip(
                ("loss", "gradient norm"), (loss, norm), limits, zip(*self.recent, strict=True), strict=True
            ):
                mean, deviation = statistics.fmean(before), statistics.stdev(before)
                if limit is not None and value - mean > limit * deviation:
                    self.told = (
                        f"its {name} {value:.4g} is above {mean + limit * deviation:.4g}, "
                        f"{limit:g} standard deviations over the mean of the {len(before)} steps before"
                    )
                    break
        self.recent.append([loss, norm])
        del self.recent[: -self.settings.window]
        return bool(self.told)
