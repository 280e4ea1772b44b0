"""An exponential moving average of the weights, kept beside a rank's fp32 masters.

After each update, with ema = decay · ema + (1 - decay) · master. The average is one more state of
the parameters: it has the masters' shapes and device, so each rank has that of its own fragments at
every ZeRO stage, 4 bytes a parameter. No bias is corrected, because it starts as the weights
themselves. With decay 0.9 and a weight that is 1, then 2 and 2:

    start 1.0     after the first update 0.9 · 1.0 + 0.1 · 2 = 1.1     after the second 1.19
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero_tp.engine.zero.fragments import Fragment

SWAPPED_ELEMENTS = 2**22
"""Elements that are swapped at once, so that a swap holds no copy of all masters."""


class WeightAverage:
    """The average of a rank's masters, as torch's `get_ema_multi_avg_fn` computes it.

    Args:
        fragments: of all parameters; their `flat` tensors are averaged whole.
        decay: the share of the old average, above 0 and below 1.
    """

    def __init__(self, fragments: Iterable[Fragment], decay: float):
        self.decay = decay
        # Under ZeRO several fragments share a flat tensor.
        flats = {id(fragment.flat): fragment.flat for fragment in fragments}
        self._masters = [flat.detach() for flat in flats.values()]
        averages = [master.clone() for master in self._masters]
        self._averages = dict(zip(flats, averages, strict=True))

    def of(self, flat: Tensor) -> Tensor:
        """Return the average of a fragment's `flat` tensor, of the same shape."""
        return self._averages[id(flat)]

    @torch.no_grad()
    def restart(self) -> None:
        """Start again from the masters."""
        if self._masters:  # a rank may have none
            torch._foreach_copy_([*self._averages.values()], self._masters)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the masters, after an update of theirs."""
        if self._masters:
            torch._foreach_lerp_([*self._averages.values()], self._masters, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange masters and average; a second call restores both bit for bit."""
        for master, average in zip(self._masters, self._averages.values(), strict=True):
            pieces = (tensor.view(-1).split(SWAPPED_ELEMENTS) for tensor in (master, average))
            for weights, averaged in zip(*pieces, strict=True):
                before = weights.clone()
                weights.copy_(averaged)
                averaged.copy_(before)
