"""The load-balancing loss of routers (arXiv 2101.03961, equations 4 to 6), over all layers of one forward.

It is transformers' `load_balancing_loss_func`: E · Σₑ fₑ Pₑ, where fₑ and Pₑ are an expert's choices and its summed
probabilities over the tokens of all layers, each divided by the number of these tokens. It is not linear in fₑ and Pₑ,
so it belongs to one micro-batch of one replica, as in transformers; DeepSpeed takes the mean over micro-batches and DP
ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_tp.architectures.spec import ExpertsSpec


class _Probabilities(torch.autograd.Function):
    """Return a router's probabilities; in backward, add the loss's gradient of them."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, balance: RouterBalance) -> Tensor:
        ctx.balance = balance
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        balance: RouterBalance = ctx.balance
        if balance.gradient is None:  # the loss was not used
            return gradient, None
        own = balance.gradient if balance.counted is None else balance.counted * balance.gradient
        return gradient + own, None


class _Loss(torch.autograd.Function):
    """Return the hidden states and the loss. Its backward precedes those of all layers, which read the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: RouterBalance) -> tuple[Tensor, Tensor]:
        ctx.balance = balance
        return hidden.view_as(hidden), balance.value()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_loss: Tensor) -> tuple[Tensor, None]:
        ctx.balance.backward(of_loss)
        return gradient, None


class RouterBalance:
    """Collects what the routers of one forward choose, and computes the loss and its gradient of the probabilities.

    The statistics are no outputs of layers: a recomputed layer keeps and returns the residual stream alone. A router
    that runs again in backward is not counted again.

    Args:
        experts: of the spec.
        mask: [b, s], 1 for a token and 0 for padding, which is not counted; None without padding.
        tensor_size: t; every TP rank has the whole gradient of the loss, and t of them are summed.
        device: where the routers compute.

    Attributes:
        counted: the mask by rows as routers have them, fp32 [s·b, 1].
        gradient: of a counted token's probabilities, fp32 [E]; set by the loss's backward.
    """

    def __init__(self, experts: ExpertsSpec, mask: Tensor | None, tensor_size: int, device: torch.device):
        self.experts, self.tensor_size = experts, tensor_size
        self.counted = None if mask is None else mask.t().float().reshape(-1, 1)
        self.gradient: Tensor | None = None
        self._choices, self._sums = torch.zeros(2, experts.count, dtype=torch.float32, device=device)
        self._rows: Tensor | float = 0.0
        self._complete = False

    def observe(self, logits: Tensor, probabilities: Tensor) -> Tensor:
        """Count one layer's choices. Return its probabilities, whose gradient will include the loss's. [n, E] each."""
        if not self._complete:
            own = logits.softmax(-1)  # in the logits' dtype, and chosen again, as transformers does
            chosen = own.topk(self.experts.per_token, dim=-1).indices
            ones = torch.ones_like(chosen, dtype=torch.float32)
            rows: Tensor | float = float(len(own))
            own = own.float()
            if self.counted is not None:
                ones, own, rows = ones * self.counted, own * self.counted, self.counted.sum()
            self._choices.scatter_add_(0, chosen.flatten(), ones.flatten())
            self._sums += own.sum(0)
            self._rows = self._rows + rows
        marked: Tensor = _Probabilities.apply(probabilities, self)
        return marked

    def loss(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layers' output, to be used instead of `hidden`, and the loss, fp32 scalar without coefficient."""
        self._complete = True
        outputs: tuple[Tensor, Tensor] = _Loss.apply(hidden, self)
        return outputs

    def value(self) -> Tensor:
        """Return the loss."""
        return self.experts.count * (self._choices / self._rows * (self._sums / self._rows)).sum()

    def backward(self, of_loss: Tensor) -> None:
        """Set the gradient from that of the loss."""
        share = self._choices / self._rows / self._rows
        self.gradient = of_loss * self.experts.count * share / self.tensor_size
