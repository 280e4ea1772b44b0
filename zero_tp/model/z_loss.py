"""Z-losses, which training adds to a model's own loss: of the logits (arXiv 2204.02311, section 5)
and of routers' logits (arXiv 2202.08906, equation 5).

Both are means of log²(Σ exp(logit)): over the labels of the batch, and over the tokens of each
layer with experts, whose means are added up, as in Megatron-LM. Like the load-balancing loss, the
routers' has its mean in each micro-batch of a replica, without padding.

n tokens, E experts.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from zero_tp.base.errors import UserError, shown
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.router_loss import RouterLoss


class ZLossWeights(NamedTuple):
    """The weights of z-losses in a model's training loss; 0 adds none.

    Attributes:
        token: of the logits'. router: of the routers'.
    """

    token: float = 0.0
    router: float = 0.0


def check_z_losses(spec: TransformerSpec, model_type: str, weights: ZLossWeights) -> None:
    """Check the weights of a model's z-losses.

    Raises:
        UserError: a weight is negative or not finite, or the model has no routers.
    """
    for name, weight in (("z_loss", weights.token), ("router_z_loss", weights.router)):
        if not 0 <= weight < math.inf:
            raise UserError(f"{name}: {shown(weight)} is not a finite number of at least 0")
    if weights.router and spec.experts is None:
        raise UserError(
            f"router_z_loss: {shown(weights.router)}, but a {model_type} has no experts; "
            "leave it out"
        )


class RouterZLoss(RouterLoss):
    """Σ over layers of the mean over tokens of log²(Σ exp(router logit)), in fp32.

    Args:
        mask, tensor_size: see `RouterLoss`.
        device: where the routers compute.
    """

    def __init__(self, mask: Tensor | None, tensor_size: int, device: torch.device):
        super().__init__(mask, tensor_size)
        self._sum = torch.zeros((), dtype=torch.float32, device=device)
        # A micro-batch of padding alone has a z-loss of 0.
        self._tokens = None if self._mask is None else self._mask.sum().clamp(min=1)
        self._gradient: Tensor | None = None

    def observe(self, logits: Tensor, scores: Tensor) -> None:
        observed = logits.detach()
        if not self._is_complete:
            squares = observed.float().logsumexp(-1, keepdim=True).square()
            if self._mask is not None:
                squares = squares * self._mask
            self._sum += squares.sum() / self._count(logits)
        # As for `RouterBalance`, a recomputed layer has no graph at first.
        if logits.requires_grad:
            logits.register_hook(partial(self._add_gradient, observed))

    def _count(self, logits: Tensor) -> Tensor | int:
        return len(logits) if self._tokens is None else self._tokens

    def _add_gradient(self, logits: Tensor, gradient: Tensor) -> Tensor:
        """Add 2 log Σ exp(logit) · probability, times what the loss's backward has received."""
        if self._gradient is None:  # the loss was not used
            return gradient
        wide = logits.float()
        log_sum = wide.logsumexp(-1, keepdim=True)
        scale = 2.0 * log_sum * (self._gradient / self._count(logits))
        if self._mask is not None:
            scale = scale * self._mask
        # Rounded once to the logits' dtype.
        return (gradient.float() + (wide - log_sum).exp() * scale).to(gradient.dtype)

    def value(self) -> Tensor:
        # A copy, because the output holds the graph, which holds this object.
        return self._sum.clone()

    def receive_gradient(self, gradient: Tensor) -> None:
        self._gradient = gradient / self.tensor_size
