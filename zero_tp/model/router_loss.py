"""Losses of all routers in one forward, which layers do not return.

A recomputed layer keeps and returns only the residual stream. So a router shows its logits to each
loss of its forward, and the loss adds its gradient to theirs in backward. A router that runs again
in backward is not counted again.

    forward     layer 1: observe    layer 2: observe    loss: all layers are counted
    backward    loss: receives its gradient    layer 2: adds it    layer 1: adds it
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor


class _AddedLoss(torch.autograd.Function):
    """Return the hidden states and the loss. Its backward precedes those of all layers, which
    read the gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, router_loss: RouterLoss) -> tuple[Tensor, Tensor]:
        ctx.router_loss = router_loss
        # The hidden states pass through, so that this backward runs before that of any layer.
        return hidden.view_as(hidden), router_loss.value()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, loss_gradient: Tensor) -> tuple[Tensor, None]:
        ctx.router_loss.receive_gradient(loss_gradient)
        return gradient, None


class RouterLoss(ABC):
    """A loss of the routers of one forward.

    Args:
        mask: [b, s], 1 for a token and 0 for padding, which is not counted; None without padding.
        tensor_size: t, which divides the loss's gradient: every TP rank adds the same one, and
            backward sums them.
    """

    def __init__(self, mask: Tensor | None, tensor_size: int):
        self.tensor_size = tensor_size
        # [s·b, 1], in the routers' order.
        self._mask = None if mask is None else mask.t().float().reshape(-1, 1)
        self._is_complete = False

    @abstractmethod
    def observe(self, logits: Tensor, scores: Tensor) -> None:
        """Count one layer's tokens, and add the loss's gradient in their backward.

        Args:
            logits, scores: of the layer's router, [n, E].
        """

    @abstractmethod
    def value(self) -> Tensor:
        """Return the loss of the counted layers, fp32 scalar without its weight."""

    @abstractmethod
    def receive_gradient(self, gradient: Tensor) -> None:
        """Keep the gradient of `value`, for the routers' backward."""

    def loss(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layers' output and the loss, fp32 scalar without its weight.

        Use this output instead of `hidden`: its backward sets the routers' gradient.
        """
        self._is_complete = True
        outputs: tuple[Tensor, Tensor] = _AddedLoss.apply(hidden, self)
        return outputs
