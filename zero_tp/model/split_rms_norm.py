"""Root mean square norms over features that are split over TP: all heads' queries, or keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.model.rms_norm import RMSNorm, Scaling, _rows, _weight_gradient
from zero_tp.parallel.collectives import Group, all_reduce
from zero_tp.parallel.layout import Replicated, Sharded
from zero_tp.parallel.parameter import ConstantInit, ParameterMaker


class _SplitRMSNorm(torch.autograd.Function):
    """Compute x / √(Σ x² / N + ε), of N features that are split over TP, times the weight.

    Forward all-reduces each row's sum of squares, backward its product of gradient and normed
    features: [n, 1] in fp32. If several ranks have a feature, each counts its `share` of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        share: Tensor | float,
        size: int,
        epsilon: float,
        scaling: type[Scaling],
        group: Group,
    ) -> Tensor:
        # TP 2, 3 KV heads, of which both ranks have k1: rank 0 adds k0² + k1²/2, rank 1 k1²/2 +
        # k2².
        squares = all_reduce((rows.float().square() * share).sum(-1, keepdim=True), group)
        scale = torch.rsqrt(squares / size + epsilon)
        ctx.save_for_backward(rows, weight, scale)
        ctx.share = share
        ctx.size = size
        ctx.scaling = scaling
        ctx.group = group
        return scaling.apply(rows.float() * scale, weight, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        normed = rows.float() * scale
        normed_gradient = ctx.scaling.normed_gradient(gradient, weight)
        projection = (
            all_reduce((normed_gradient * normed).sum(-1, keepdim=True), ctx.group) / ctx.size
        )
        # Ranks that share a head each have the gradient of their own queries, which are added up
        # later in the weights' and the input's gradients. The projection counts once there, hence
        # its share.
        rows_gradient = ((normed_gradient - normed * projection * ctx.share) * scale).to(rows.dtype)
        weight_gradient = _weight_gradient(gradient, rows, scale, ctx.scaling).to(weight.dtype)
        return rows_gradient, weight_gradient, *(None,) * 5


class SplitRMSNorm(nn.Module):
    """RMSNorm over the features of all heads together, of which a rank has some.

    [b, heads, s, d] → the same.

    Ranks may share heads (see `GroupedQKV`). Each then counts such a head in part, and the weight's
    gradient is partial.

    Args:
        heads_by_rank: heads of each TP rank.
        size: features of a head, d.
        like: the norm that it computes over all heads.
    """

    def __init__(
        self,
        make: ParameterMaker,
        heads_by_rank: Sequence[range],
        size: int,
        epsilon: float,
        like: type[RMSNorm] = RMSNorm,
    ):
        super().__init__()
        own = heads_by_rank[make.topology.tensor_rank]
        count = heads_by_rank[-1].stop
        self.size = size
        self.total = count * size
        self.epsilon = epsilon
        self.group = make.topology.tensor_group
        shared = sum(map(len, heads_by_rank)) > count
        self.ranks_per_head = (
            [sum(head in heads for heads in heads_by_rank) for head in own] if shared else None
        )
        self.features = slice(own.start * size, own.stop * size)
        # Ranks that share a head need the same elements, so no split gives each its own.
        layout = Replicated("partial") if shared else Sharded(0, (self.total,))
        initial = ConstantInit(like.initial_weight)
        self.weight = make.parameter("weight", (self.total,), layout, initial)
        self.scaling = like.scaling

    def forward(self, heads: Tensor) -> Tensor:
        share: Tensor | float = 1.0
        weight: Tensor = self.weight
        # A tensor from the host would synchronise with the device.
        if self.ranks_per_head is not None:
            parts = [
                weight.new_full((self.size,), 1 / count, dtype=torch.float32)
                for count in self.ranks_per_head
            ]
            share = torch.cat(parts)
            weight = weight[self.features]
        joined = heads.permute(2, 0, 1, 3).flatten(2)  # [s, b, w]
        normed: Tensor = _SplitRMSNorm.apply(
            _rows(joined), weight, share, self.total, self.epsilon, self.scaling, self.group
        )
        return normed.view(*joined.shape[:2], -1, self.size).permute(1, 2, 0, 3)
