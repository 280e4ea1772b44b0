"""Find steps whose loss or gradient norm is a spike, as OLMo-core's skip-step optimizer does."""

from __future__ import annotations

import statistics

from zero_tp.config.schema import Spike


def describe_spike(settings: Spike, recent: list[list[float]], loss: float, norm: float) -> str:
    """Return why a step of this finite loss and norm is a spike; "" if it is none, or the window is not half full.

    A step is a spike if its loss or norm is more than so many standard deviations above the mean of the steps in the
    window. Spikes enter the window too: a new level soon stops being one.

    Args:
        recent: [loss, norm] of the last steps, to which this one is added; checkpoints save it.
    """
    reasons = []
    if len(recent) >= max(2, settings.window // 2):
        losses, norms = zip(*recent, strict=True)
        bounded = (("loss", loss, settings.loss, losses), ("gradient norm", norm, settings.grad_norm, norms))
        for name, value, limit, before in bounded:
            mean, deviation = statistics.fmean(before), statistics.stdev(before)
            if limit is not None and value - mean > limit * deviation:
                reasons.append(
                    f"its {name} {value:.4g} is above {mean + limit * deviation:.4g}, {limit:g} standard deviations "
                    f"over the mean of the {len(before)} steps before"
                )
    recent.append([loss, norm])
    del recent[: -settings.window]
    return reasons[0] if reasons else ""
