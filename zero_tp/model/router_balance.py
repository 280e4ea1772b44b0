"""Statistics of all routers in one forward: the load-balancing loss (arXiv 2101.03961, equations 4
to 6), and the choices by which routers' biases are updated.

The loss is transformers' `load_balancing_loss_func`: E · Σₑ fₑ Pₑ. fₑ counts an expert's choices,
Pₑ sums its probabilities over the tokens of all layers; both are divided by the number of these
tokens. As in transformers, each micro-batch of a replica has its own loss, because it is not linear
in fₑ and Pₑ. DeepSpeed averages over micro-batches and DP ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zero_tp.model.architectures.spec import ExpertsSpec


class _Loss(torch.autograd.Function):
    """Return the hidden states and the loss. Its backward precedes those of all layers, which
    read the gradient.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, balance: RouterBalance) -> tuple[Tensor, Tensor]:
        ctx.balance = balance
        fraction = balance.choices / balance.tokens
        probability = balance.probability_sums / balance.tokens
        # The hidden states pass through, so that this backward runs before that of any layer.
        return hidden.view_as(hidden), balance.experts.count * (fraction * probability).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, loss_gradient: Tensor) -> tuple[Tensor, None]:
        balance: RouterBalance = ctx.balance
        # Counts have no gradient. With T counted tokens, E · Σₑ fₑ Pₑ has the gradient E · fₑ / T
        # for every counted token's probability of expert e, and fₑ is choices / T.
        share = balance.choices / balance.tokens / balance.tokens
        balance.gradient = loss_gradient * balance.experts.count * share / balance.tensor_size
        return gradient, None


class RouterBalance:
    """Count the routers' choices in one forward, and give their probabilities the loss's gradient.

    Layers do not return the statistics, because a recomputed layer keeps and returns only the
    residual stream. A router that runs again in backward is not counted again.

        forward     layer 1: observe    layer 2: observe    loss: statistics are complete
        backward    loss: sets `gradient`    layer 2: adds it    layer 1: adds it

    Args:
        experts: the spec's settings.
        mask: [b, s], 1 for a token and 0 for padding, which is not counted; None without padding.
        tensor_size: t, which divides the loss's gradient: every TP rank adds the same one, and
            backward sums them.
        device: where the routers compute.

    Attributes:
        choices, probability_sums: each expert's choices and its summed probabilities over the
            counted tokens, fp32 [E].
        tokens: number of counted tokens; each layer counts a token once.
        gradient: of a counted token's probabilities, fp32 [E]; set by the loss's backward.
    """

    def __init__(
        self, experts: ExpertsSpec, mask: Tensor | None, tensor_size: int, device: torch.device
    ):
        self.experts = experts
        self.tensor_size = tensor_size
        # [s·b, 1], in the routers' order.
        self._mask = None if mask is None else mask.t().float().reshape(-1, 1)
        self._is_counted = False
        self.gradient: Tensor | None = None
        self.choices, self.probability_sums = torch.zeros(
            2, experts.count, dtype=torch.float32, device=device
        )
        self.tokens: Tensor | float = 0.0

    def observe(self, logits: Tensor, probabilities: Tensor) -> None:
        """Count one layer's choices, and add the loss's gradient to that of its probabilities.

        Args:
            logits, probabilities: [n, E].
        """
        if not self._is_counted:
            # transformers' loss computes softmax and top-k again, in the logits' dtype.
            rounded = logits.detach().softmax(-1)
            chosen = rounded.topk(self.experts.per_token, dim=-1).indices
            ones = torch.ones_like(chosen, dtype=torch.float32)
            tokens: Tensor | float = float(len(rounded))
            rounded = rounded.float()
            if self._mask is not None:
                ones = ones * self._mask
                rounded = rounded * self._mask
                tokens = self._mask.sum()
            self.choices.scatter_add_(0, chosen.flatten(), ones.flatten())
            self.probability_sums += rounded.sum(0)
            self.tokens = self.tokens + tokens
        # A recomputed layer runs first without a graph; its hook is set when backward runs it
        # again.
        if probabilities.requires_grad:
            probabilities.register_hook(self._add_gradient)

    def _add_gradient(self, gradient: Tensor) -> Tensor:
        if self.gradient is None:  # the loss was not used
            return gradient
        return gradient + (self.gradient if self._mask is None else self._mask * self.gradient)

    def loss(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layers' output and the loss, fp32 scalar without its coefficient.

        Use this output instead of `hidden`: its backward sets the routers' gradient.
        """
        self._is_counted = True
        outputs: tuple[Tensor, Tensor] = _Loss.apply(hidden, self)
        return outputs


class ChoiceCount:
    """Count the tokens of one forward that choose each expert of a layer, without padding.

    As in `RouterBalance`, a router that runs again in backward is not counted again.

    Args:
        mask: [b, s], 1 for a token and 0 for padding; None without padding.
    """

    def __init__(self, mask: Tensor | None):
        # [s·b, 1], in the routers' order.
        self._mask = None if mask is None else mask.t().long().reshape(-1, 1)
        self._is_complete = False

    def add(self, chosen: Tensor, choices: Tensor) -> None:
        """Add the tokens' chosen experts, [n, k], to a router's counts `choices`, int64 [E]."""
        if self._is_complete:
            return
        ones = torch.ones_like(chosen) if self._mask is None else self._mask.expand_as(chosen)
        choices.scatter_add_(0, chosen.flatten(), ones.flatten())

    def complete(self) -> None:
        """End the count: what runs after this is recomputation."""
        self._is_complete = True
