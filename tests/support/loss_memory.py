"""Memory of the loss in blocks of other sizes."""

from __future__ import annotations

import torch
from torch import Tensor


def blocks(
    dtype: torch.dtype, count: int
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor], Tensor]:
    """Differences [n, v] and hidden states [n, h] of `count` blocks, each one's product in fp64,
    and the sum of all products of their numbers' sizes.
    """
    pairs = [(torch.randn(96, 24).to(dtype), torch.randn(96, 16).to(dtype)) for _ in range(count)]
    exact = [first.double().t() @ second.double() for first, second in pairs]
    sizes = [first.double().abs().t() @ second.double().abs() for first, second in pairs]
    return pairs, exact, torch.stack(sizes).sum(0)
