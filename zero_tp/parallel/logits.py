"""Logits of a vocabulary that is split over TP, and their softmax.

n rows, v vocabulary, t TP size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.parallel.collectives import Group, all_gather, group_size
from zero_tp.parallel.elementwise import CHUNKED, ElementwiseOps

SLICE_ELEMENTS = 2**22
"""Logits converted to fp32 at a time on accelerators, whose kernels need work for all cores: 16
MiB.
"""


class LogitMap(NamedTuple):
    """A function of each logit: times `scale`, then cap · tanh(x / cap) if there is a cap.

    It rounds to the logits' dtype after each operation, as transformers' models do.
    """

    scale: float = 1.0
    cap: float | None = None

    def apply_(self, logits: Tensor) -> None:
        """Map logits in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)

    def slope(self, mapped: Tensor) -> Tensor | float:
        """Return the derivative, from the mapped logits in fp32."""
        if self.cap is None:
            return self.scale
        # Rows without a token have the smallest number (`mask_padding_`), far below the cap.
        return (1.0 - (mapped / self.cap).clamp(-1.0, 1.0).square()) * self.scale


def _map_(logits: Tensor, logit_map: LogitMap) -> None:
    logit_map.apply_(logits)


def map_logits_(logits: Tensor, logit_map: LogitMap, ops: ElementwiseOps = CHUNKED) -> Tensor:
    """Map logits [n, v/t] in place and return them."""
    if logit_map != LogitMap():
        ops.map_rows(_map_, (logits,), logit_map, accelerator_elements=SLICE_ELEMENTS)
    return logits


def shard_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    valid: int,
    logit_map: LogitMap = LogitMap(),  # noqa: B008 (immutable)
) -> Tensor:
    """Return the logits in fp32. [n, h] × [v/t, h] → [n, v/t].

    Padded rows of the weight, from `valid` on, get no probability.
    """
    return mask_padding_(map_logits_(F.linear(hidden, weight, bias), logit_map).float(), valid)


def mask_padding_(logits: Tensor, valid: int) -> Tensor:
    if valid < logits.shape[1]:
        # The smallest number and not -inf: on a rank that has padding alone -inf - -inf is nan.
        # This one's sum is scaled by exp(smallest - greatest), which is 0.
        logits[:, valid:] = torch.finfo(torch.float32).min
    return logits


class Softmax(NamedTuple):
    """The statistics of a softmax over the whole vocabulary, gathered from all t ranks.

    Attributes:
        maxima: each rank's greatest logit, [t, n]. greatest: their maximum, [n].
        total: sum of exp(logit - greatest) over the vocabulary, [n].
        extra: the other exchanged numbers, [t, m, n].
    """

    maxima: Tensor
    greatest: Tensor
    total: Tensor
    extra: Tensor

    def is_argmax(self, is_local_argmax: Tensor) -> Tensor:
        """Return whether a label is the argmax of the whole vocabulary; of equal logits the first
        is.

        Args:
            is_local_argmax: whether the label is the argmax of each rank's own logits, [t, n, *] →
                [n, *].
        """
        is_greatest = self.maxima == self.greatest
        # Ranks hold ascending ranges of tokens, so the first rank with the maximum has the lowest
        # token.
        first = is_greatest & (is_greatest.cumsum(0) == 1)
        return (first.view(*first.shape, *(1,) * (is_local_argmax.ndim - 2)) & is_local_argmax).any(
            0
        )


def all_gather_statistics(
    maximum: Tensor, total: Tensor, extra: Sequence[Tensor], group: Group
) -> Tensor:
    """Exchange maxima and sums over TP for `softmax_of`, [t, 2 + m, n]. One all-gather.

    Args:
        maximum: of each row of this rank's logits, [n].
        total: sum of exp(logit - maximum) over this rank's logits, [n].
        extra: m more numbers of each row, m times [n].
    """
    return all_gather(torch.stack((maximum, total, *extra)).unsqueeze(0), group)


def softmax_of(statistics: Tensor) -> Softmax:
    """Return the softmax of the whole vocabulary from all ranks' statistics, [t, 2 + m, n].

    A rank's sum is relative to its own maximum, and moves to the greatest of all:

        logits     1, 3 on rank 0          2, 0 on rank 1
        sent       3, exp(-2) + 1          2, 1 + exp(-2)
        total      (exp(-2) + 1) exp(3 - 3) + (1 + exp(-2)) exp(2 - 3)
    """
    maxima = statistics[:, 0]
    totals = statistics[:, 1]
    greatest = maxima.amax(0)
    total = (totals * (maxima - greatest).exp()).sum(0)
    return Softmax(maxima, greatest, total, statistics[:, 2:])


def vocab_parallel_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    vocabulary: int,
    group: Group,
    logit_map: LogitMap = LogitMap(),  # noqa: B008 (immutable)
) -> Tensor:
    """Return the whole logits on every TP rank. [s, b, h] → [s, b, v]; all-gather over TP, no
    gradient through it.
    """
    local = map_logits_(F.linear(hidden, weight, bias).detach(), logit_map)
    if group_size(group) == 1:
        return local[..., :vocabulary]
    # All ranks before the one of the last token are full, so the padding is at the end, and one cut
    # drops it.
    gathered = all_gather(local.unsqueeze(0), group)  # [t, s, b, v/t]
    return gathered.movedim(0, 2).flatten(2, 3)[..., :vocabulary]
