"""Z-losses by autograd on the logits of transformers' own classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.constants import IGNORE_INDEX


def squares(logits: Tensor) -> Tensor:
    """The squared log-sum-exp of each row of logits, in fp32."""
    return logits.float().logsumexp(-1).square()


def sum_of_token_z_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed over the labels that are not ignored; targets are those of their own positions."""
    return squares(logits)[targets != IGNORE_INDEX].sum()


@contextmanager
def recorded_router_logits(model: Any) -> Iterator[list[Tensor]]:
    """The logits of each router in the forwards of this block, [b·s, E], with their graph."""
    logits: list[Tensor] = []
    routers = [module for name, module in model.named_modules() if name.endswith(ROUTERS)]
    hooks = [
        router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        for router in routers
    ]
    yield logits
    for hook in hooks:
        hook.remove()


ROUTERS = ("mlp.gate", "mlp.router", "block_sparse_moe.router")
"""Names of the modules of transformers' classes that return their logits first."""


def router_z_loss(logits: list[Tensor], mask: Tensor | None = None) -> Tensor:
    """The mean of each layer over the tokens that are not padding, summed over layers.

    Args:
        mask: [b, s], 1 for a token and 0 for padding.
    """
    assert logits
    counted = slice(None) if mask is None else mask.flatten().bool()
    return torch.stack([squares(layer)[counted].mean() for layer in logits]).sum()
