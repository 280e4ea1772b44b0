"""Products of rows that are sorted by group, each group with a matrix of its own.

n rows, E groups, i input features, o output features.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.parameter import Normal, ParameterMaker


def group_ends(groups: Tensor, count: int) -> Tensor:
    """Return where each group ends among sorted rows. Each row's group [n] → int64 [count], on the same device."""
    return torch.zeros(count, dtype=torch.int64, device=groups.device).scatter_add_(0, groups, groups * 0 + 1).cumsum(0)


def _slices(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the number and the rows of each group that has any."""
    start = 0
    for number, end in enumerate(ends.tolist()):
        if end > start:
            yield number, slice(start, end)
        start = end


class _GroupedProduct(torch.autograd.Function):
    """Compute Y[rows of group e] = X[rows of group e] W_eᵀ. [n, i], [E, o, i] → [n, o]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        # The whole parameter, no view of it: ZeRO-3 takes its data away until backward.
        ctx.save_for_backward(rows, weight, ends)
        output = rows.new_empty(len(rows), weight.shape[1])
        for number, part in _slices(ends):
            torch.mm(rows[part], weight[number].t(), out=output[part])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        needs_rows, needs_weight, _ = ctx.needs_input_grad
        of_rows = torch.empty_like(rows) if needs_rows else None
        of_weight = torch.zeros_like(weight) if needs_weight else None  # a group without rows gets zeros
        for number, part in _slices(ends):
            if of_rows is not None:
                torch.mm(gradient[part], weight[number], out=of_rows[part])
            if of_weight is not None:
                torch.mm(gradient[part].t(), rows[part], out=of_weight[number])
        return of_rows, of_weight, None


class GroupedLinear(nn.Module):
    """Linear layers of E groups in one weight [E, o, i], which is split over TP as `layout` says.

    Raises:
        ValueError: a part of the layout does not divide by the TP size.
    """

    def __init__(self, make: ParameterMaker, groups: int, inputs: int, outputs: int, layout: Sharded, init: Normal):
        super().__init__()
        self.weight = make.make("weight", (groups, outputs, inputs), layout, init)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Multiply rows, sorted by group, by their group's matrix. [n, i], int64 [E] → [n, o].

        The host reads the groups' ends.
        """
        output: Tensor = _GroupedProduct.apply(rows, self.weight, ends)
        return output
