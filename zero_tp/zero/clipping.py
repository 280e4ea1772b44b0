"""The gradient norm and clipping of ZeRO-0, in fp64.

ZeRO-1, -2 and -3 compute both themselves, in fp64. Without ZeRO, DeepSpeed takes fp32 norms (inexact at 1e-4 on CPUs),
reports none in fp32, and in 16 bit counts only the gradients of TP rank 0. So stage 0 gets its norm and its clipping
here, and DeepSpeed's clipping is off.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from zero_tp.parallel.collectives import all_reduce
from zero_tp.parallel.layout import Sharded, layout_of
from zero_tp.topology import Topology


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], topology: Topology) -> Tensor:
    """Return the 2-norm of all gradients of the model, fp64 scalar, equal on all TP ranks.

    Shards count on every rank, replicated parameters once. All-reduce of one number over TP.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        total = total.to(parameter.device)
        if parameter.grad is not None and (isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0):
            total += parameter.grad.double().square().sum()
    return all_reduce(total, topology.tensor_group).sqrt()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, limit: float) -> None:
    """Scale all gradients by min(1, limit / (norm + 1e-6)), as DeepSpeed and torch do."""
    factor = limit / (norm.item() + 1e-6)  # a number: as a tensor it would be rounded to the gradients' dtype
    if factor < 1:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
