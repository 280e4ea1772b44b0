"""Find steps whose loss or gradient norm is a spike."""

from __future__ import annotations

import math
import statistics

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.base.settings.schema import Spike
from zero_tp.parallel.topology import Topology


class StepVeto:
    """Skips a step with a spike, on all ranks alike.

    Gradients that are not finite are found by `AdamWUpdate.step`, `ZeroStage0` or DeepSpeed. The
    step's figures pass through here, so that the update reads them together with its norm.

    Attributes:
        recent: [loss, norm] of the last steps, for the next judgement; checkpoints save it.
        spike: why the last step was skipped as a spike; else empty.
        norm: the gradient norm of a spike; else None.
        figures: the step's, on the device; the first is the loss. None: not the last micro-batch.
        read_figures: the same numbers, if the step has read them with its norm.
    """

    def __init__(self, topology: Topology, bounds: Spike | None = None):
        self.recent: list[list[float]] = []
        self.spike = ""
        self.norm: Tensor | None = None
        self._topology = topology
        self._bounds = bounds
        self.figures: Tensor | None = None
        self.read_figures: list[float] | None = None

    def begin(self, figures: Tensor | None) -> None:
        """Begin a step with these figures; None: a micro-batch that is not the step's last."""
        self.figures = figures
        self.read_figures = None
        self.spike = ""
        self.norm = None

    @property
    def is_active(self) -> bool:
        """Return whether a norm of this step would be judged."""
        return self._bounds is not None and self.figures is not None

    def finds_spike(self, norm: Tensor) -> bool:
        """Return whether the step is a spike. Every rank calls it.

        Without bounds the host does not wait for the norm. With them rank 0's loss and norm are
        broadcast and read at once. Numbers that are not finite are no spike; some of DeepSpeed's
        norms are -1 then.

        Args:
            norm: the gradient norm before clipping [0-d].
        """
        if self._bounds is None or self.figures is None:
            return False
        numbers = torch.stack([self.figures[0], norm.to(self.figures)])
        # One rank judges for all: numbers that two ranks round differently could skip the step on
        # one of them, and the replicas would drift apart.
        if self._topology.world > 1:
            dist.broadcast(numbers, 0)
        loss, gradient_norm = numbers.tolist()
        if math.isfinite(loss) and math.isfinite(gradient_norm) and gradient_norm >= 0:
            self.spike = detect_spike(self._bounds, self.recent, loss, gradient_norm)
        if self.spike:
            self.norm = norm
        return bool(self.spike)


def detect_spike(settings: Spike, recent: list[list[float]], loss: float, norm: float) -> str:
    """Return why a step is a spike, or "" if it is none; add its finite loss and norm to `recent`.

    Nothing is a spike until the window is half full.

    As in OLMo-core's skip-step optimizer, a spike exceeds the window's mean by more than
    `settings.loss` or `settings.grad_norm` standard deviations. Spikes enter the window too, so a
    new level soon stops being one. With a window of 4 and a bound of 6 on the loss:

        losses before    2.0  2.1  1.9  2.0         mean 2, deviation 0.082
        this loss        2.5                        above 2 + 6 · 0.082 = 2.49: a spike
        losses before    2.1  1.9  2.0  2.5         the next step allows 2.125 + 6 · 0.263 = 3.70

    Args:
        recent: [loss, norm] of the last steps; checkpoints save it.
    """
    reasons = []
    # A deviation needs two numbers.
    if len(recent) >= max(2, settings.window // 2):
        losses, norms = zip(*recent, strict=True)
        bounded = (
            ("loss", loss, settings.loss, losses),
            ("gradient norm", norm, settings.grad_norm, norms),
        )
        for name, value, limit, before in bounded:
            mean = statistics.fmean(before)
            deviation = statistics.stdev(before)
            if limit is not None and value - mean > limit * deviation:
                reasons.append(
                    f"its {name} {value:.4g} is above {mean + limit * deviation:.4g}, {limit:g} "
                    "standard deviations "
                    f"over the mean of the {len(before)} steps before"
                )
    # Appended after the judgement: a step is compared with those before it.
    recent.append([loss, norm])
    del recent[: -settings.window]
    return reasons[0] if reasons else ""
