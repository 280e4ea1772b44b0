"""A mixture of experts: a router chooses k of E gated MLPs for each token (arXiv 2101.03961, 2401.04088).

Every expert's first weight is split by columns and its second by rows over TP, so the communication is that of a dense
MLP whatever E is: f and f̄, or g and ḡ under SP. Every rank routes all tokens, and computes its columns of the chosen
experts. s sequence, b batch, n = s·b tokens, h hidden, f expert size, k experts a token, t TP size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.architectures.spec import TransformerSpec
from zero_tp.models.context import ForwardContext
from zero_tp.models.mlp import GatedActivation
from zero_tp.models.router_balance import RouterBalance
from zero_tp.parallel.collectives import (
    copy_to_tensor_region,
    gather_from_sequence_region,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)
from zero_tp.parallel.grouped import GroupedLinear, group_ends
from zero_tp.parallel.layout import Replicated, Sharded
from zero_tp.parallel.parameter import Normal, ParameterMaker


class Router(nn.Module):
    """Choose each token's experts: a linear layer, softmax in fp32, the k most probable.

    Its weight is replicated. A rank has only its part of the experts' outputs, so the gradient is partial.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        assert spec.experts is not None
        self.experts = spec.experts
        layout = Replicated("partial" if make.topology.tensor > 1 else "identical")
        self.weight = make.make("weight", (spec.experts.count, spec.hidden), layout, Normal(spec.init_std))

    def forward(self, tokens: Tensor, balance: RouterBalance | None) -> tuple[Tensor, Tensor]:
        """Return the weights, fp32, and numbers of each token's experts. [n, h] → [n, k], int64 [n, k]."""
        logits = F.linear(tokens, self.weight)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        if balance is not None:
            probabilities = balance.observe(logits.detach(), probabilities)
        weights, chosen = probabilities.topk(self.experts.per_token, dim=-1)
        if self.experts.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen


class _Reorder(torch.autograd.Function):
    """Repeat every row `copies` times, in a new order. [n, h] → [n·copies, h].

    Args:
        order: int64 [n·copies]; row j of the output is copy `order[j]`. inverse: its inverse permutation.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return rows[order // copies] if copies > 1 else rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        copies: Tensor = gradient[inverse]
        if ctx.copies > 1:
            copies = copies.unflatten(0, (-1, ctx.copies)).sum(1)
        return copies, None, None, None


class Experts(nn.Module):
    """Σ over a token's k experts of weight · (activation(x Wᵍ) · x Wᵘ) Wᵈ. [s, b, h] → [s, b, h], shards under SP.

    No token is dropped, however many choose the same expert.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        assert spec.experts is not None
        count, size = spec.experts.count, spec.mlp_size
        init, end = Normal(spec.init_std), Normal(spec.residual_std)
        self.topology = make.topology
        self.router = Router(make.child("router"), spec)
        columns, rows = Sharded(1, (size, size)), Sharded(2, (size,))
        self.gate_up = GroupedLinear(make.child("gate_up"), count, spec.hidden, 2 * size, columns, init)
        self.activation = GatedActivation(spec.activation)
        self.down = GroupedLinear(make.child("down"), count, size, spec.hidden, rows, end)

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        group, enter, leave = self.topology.tensor_group, copy_to_tensor_region, reduce_from_tensor_region
        if context.sequence:
            enter, leave = gather_from_sequence_region, reduce_scatter_to_sequence_region
        whole = enter(tensor, group)
        mixed = self._mix(whole.flatten(0, 1), context.balance)
        return leave(mixed.view_as(whole), group)

    def _mix(self, tokens: Tensor, balance: RouterBalance | None) -> Tensor:
        """Return this rank's part of the outputs. [n, h] → [n, h]."""
        weights, chosen = self.router(tokens, balance)
        groups, copies = chosen.flatten(), chosen.shape[1]
        order = groups.argsort(stable=True)
        inverse = order.argsort()
        ends = group_ends(groups, self.router.experts.count)
        wide = self.gate_up(_Reorder.apply(tokens, order, inverse, copies), ends)
        outputs = _Reorder.apply(self.down(self.activation(wide), ends), inverse, order, 1)
        # Weighted and added in fp32, rounded once, as transformers does.
        weighted = outputs.unflatten(0, (-1, copies)) * weights.unsqueeze(-1)
        return weighted.sum(1).to(tokens.dtype)
