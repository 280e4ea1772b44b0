"""Norms of gradients are taken in fp64, piece by piece: a copy of a whole gradient would be twice its size."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.blocking import cache_rows
from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.layout import Sharded, layout_of
from zero_tp.topology import Topology

_ELSEWHERE_ELEMENTS = 2**24


@torch.no_grad()
def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of all elements, fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    column = tensor.reshape(-1, 1)
    for piece in cache_rows(column, _ELSEWHERE_ELEMENTS):
        total += column[piece].double().square_().sum()
    return total


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], topology: Topology) -> Tensor:
    """Return the 2-norm of all gradients of the model, fp64 scalar, equal on all TP ranks.

    Shards count on every rank, replicated parameters once. All-reduce of one number over TP.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        total = total.to(parameter.device)
        if parameter.grad is not None and (isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0):
            total += sum_of_squares(parameter.grad)
    return all_reduce(total, topology.tensor_group).sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by min(1, limit / (norm + 1e-6)), as DeepSpeed and torch do."""
    factor = limit / (norm.item() + 1e-6)  # a number: as a tensor it would be rounded to the gradients' dtype
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


def measure_in_pieces(optimizer: Any) -> None:
    """Give one of DeepSpeed's ZeRO optimizers the norm of each gradient, where it takes them of copies in fp64."""
    direct = getattr(optimizer, "get_grad_norm_direct", None)
    if direct is None:  # its BF16_Optimizer
        return

    def in_pieces(gradients: Iterable[Tensor], params: Iterable[nn.Parameter], norm_type: float = 2) -> Tensor:
        assert norm_type == 2, "only the 2-norm is taken"
        own = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
        norm: Tensor = direct([sum_of_squares(gradient).sqrt().reshape(1) for gradient in own], params, norm_type)
        return norm

    optimizer.get_grad_norm_direct = in_pieces
