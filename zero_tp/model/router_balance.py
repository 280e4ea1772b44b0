"""Statistics of all routers in one forward: the load-balancing loss (arXiv 2101.03961, equations 4
to 6), and the choices by which routers' biases are updated.

The loss is transformers' `load_balancing_loss_func`: E · Σₑ fₑ Pₑ. fₑ counts an expert's choices,
Pₑ sums its probabilities over the tokens of all layers; both are divided by the number of these
tokens. As in transformers, each micro-batch of a replica has its own loss, because it is not linear
in fₑ and Pₑ. DeepSpeed averages over micro-batches and DP ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_tp.model.architectures.spec import ExpertsSpec
from zero_tp.model.router_loss import RouterLoss


class RouterBalance(RouterLoss):
    """Count the routers' choices in one forward, and give their probabilities the loss's gradient.

    Args:
        experts: the spec's settings.
        mask, tensor_size: see `RouterLoss`.
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
        super().__init__(mask, tensor_size)
        self.experts = experts
        self.gradient: Tensor | None = None
        self.choices, self.probability_sums = torch.zeros(
            2, experts.count, dtype=torch.float32, device=device
        )
        self.tokens: Tensor | float = 0.0

    def observe(self, logits: Tensor, scores: Tensor) -> None:
        if not self._is_complete:
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
        if scores.requires_grad:
            scores.register_hook(self._add_gradient)

    def _add_gradient(self, gradient: Tensor) -> Tensor:
        if self.gradient is None:  # the loss was not used
            return gradient
        return gradient + (self.gradient if self._mask is None else self._mask * self.gradient)

    def value(self) -> Tensor:
        fraction = self.choices / self.tokens
        probability = self.probability_sums / self.tokens
        return self.experts.count * (fraction * probability).sum()

    def receive_gradient(self, gradient: Tensor) -> None:
        # Counts have no gradient. With T counted tokens, E · Σₑ fₑ Pₑ has the gradient E · fₑ / T
        # for every counted token's probability of expert e, and fₑ is choices / T.
        share = self.choices / self.tokens / self.tokens
        self.gradient = gradient * self.experts.count * share / self.tensor_size


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
