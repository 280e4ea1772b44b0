"""Norms over the last dimension, of whole activations [s, b, h] or of this rank's part of them.

A part is a sequence shard [s/t, b, h] under SP, or the rank's heads. Then the gradients of weight
and bias are partial too, and backward sums them over TP: one all-reduce for both, while it computes
the input's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, all_reduce
from zero_tp.parallel.elementwise import ElementwiseModule, ElementwiseOps
from zero_tp.parallel.gradients import GradientSum
from zero_tp.parallel.layout import Replicated, Sharded
from zero_tp.parallel.parameter import ConstantInit, ParameterMaker


class Norm(ElementwiseModule):
    """A norm with a weight, and the sum of its partial gradient.

    Args:
        sharded_input: the input is this rank's part, so gradients of the weights are partial.
    """

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__()
        self.epsilon = epsilon
        # LayerNorm's bias shares this layout and this sum.
        self.layout = Replicated("partial" if sharded_input else "identical")
        self.gradient_sum = GradientSum(make.topology.tensor_group) if sharded_input else None
        self.weight = make.parameter("weight", (size,), self.layout, ConstantInit(1.0))


class _PartialLayerNorm(torch.autograd.Function):
    """LayerNorm of this rank's tokens; backward sums the gradients of weight and bias over TP."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor,
        epsilon: float,
        gradient_sum: GradientSum,
    ) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(tensor, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(tensor, mean, scale, weight, bias)
        ctx.gradient_sum = gradient_sum
        return normed

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        tensor, mean, scale, weight, bias = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def gradients(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.native_layer_norm_backward(
                gradient, tensor, weight.shape, mean, scale, weight, bias, list(wanted)
            )

        # Weight and bias first: their all-reduce runs while the input's gradient is computed. So
        # torch's kernel is called twice, each time for what is wanted.
        reducing = (
            ctx.gradient_sum.start(*gradients(False, True, True)[1:])
            if needs_weight or needs_bias
            else None
        )
        input_gradient = gradients(True, False, False)[0] if needs_input else None
        weight_gradient, bias_gradient = reducing.wait() if reducing is not None else (None, None)
        return input_gradient, weight_gradient, bias_gradient, None, None


class LayerNorm(Norm):
    """Layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__(make, size, epsilon, sharded_input=sharded_input)
        self.bias = make.parameter("bias", (size,), self.layout, ConstantInit(0.0))

    def forward(self, tensor: Tensor) -> Tensor:
        if self.gradient_sum is None:
            return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.epsilon)
        output: Tensor = _PartialLayerNorm.apply(
            tensor, self.weight, self.bias, self.epsilon, self.gradient_sum
        )
        return output


def _rms_norm(rows: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows [n, h], rounded before the weight, and their scales, fp32 [n, 1]."""
    rows_fp32 = rows.float()
    scale = torch.rsqrt(rows_fp32.square().mean(-1, keepdim=True) + epsilon)
    # transformers' LlamaRMSNorm rounds here too; rounding once, after the weight, gives other bits.
    return weight * (rows_fp32 * scale).to(rows.dtype), scale


def _weight_gradient(gradient: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of the weight, fp32 [h]."""
    # The normed rows are computed again: they would be another activation of 2sbh bytes.
    return (gradient * (rows.float() * scale).to(rows.dtype)).sum(0, dtype=torch.float32)


def _rows_gradient(gradient: Tensor, rows: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the rows [n, h]."""
    # With n = x·scale and g = dY·w: dx = (g - n · mean(g · n)) · scale.
    normed = rows.float() * scale
    normed_gradient = (gradient * weight).float()
    projection = (normed_gradient * normed).mean(-1, keepdim=True)
    return ((normed_gradient - normed * projection) * scale).to(rows.dtype)


def _gradients(
    gradient: Tensor, rows: Tensor, scale: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight. Compiled it reads the rows once."""
    return (
        _rows_gradient(gradient, rows, scale, weight),
        _weight_gradient(gradient, rows, scale),
    )


class _RMSNorm(torch.autograd.Function):
    """Compute x / √(mean(x²) + ε) in fp32, rounded, times the weight. Backward keeps x and one
    number per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        epsilon: float,
        gradient_sum: GradientSum | None,
        ops: ElementwiseOps,
    ) -> Tensor:
        normed, scale = ops.map_rows(_rms_norm, (_rows(tensor),), weight, epsilon)
        ctx.save_for_backward(tensor, weight, scale)
        ctx.gradient_sum = gradient_sum
        ctx.ops = ops
        output: Tensor = normed.view(tensor.shape)
        return output

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        tensor, weight, scale = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        rows = (_rows(gradient), _rows(tensor), scale)
        reducing = weight_gradient = input_gradient = None
        if needs_weight and needs_input and ctx.gradient_sum is None:
            input_gradient, weight_gradient = ctx.ops.map_and_sum_rows(_gradients, rows, weight)
            weight_gradient = weight_gradient.to(weight.dtype)
            return input_gradient.view(tensor.shape), weight_gradient, None, None, None
        if needs_weight:
            # Its all-reduce runs while the input's gradient is computed.
            weight_gradient = ctx.ops.sum_rows(_weight_gradient, rows).to(weight.dtype)
            reducing = (
                ctx.gradient_sum.start(weight_gradient) if ctx.gradient_sum is not None else None
            )
        if needs_input:
            input_gradient = ctx.ops.map_rows(_rows_gradient, rows, weight).view(tensor.shape)
        if reducing is not None:
            (weight_gradient,) = reducing.wait()
        return input_gradient, weight_gradient, None, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class RMSNorm(Norm):
    """Root mean square normalisation, with a weight. [*, h] → [*, h].

    Equation 4 of arXiv 1910.07467.
    """

    def forward(self, tensor: Tensor) -> Tensor:
        output: Tensor = _RMSNorm.apply(
            tensor, self.weight, self.epsilon, self.gradient_sum, self.elementwise
        )
        return output


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
        group: Group,
    ) -> Tensor:
        # TP 2, 3 KV heads, of which both ranks have k1: rank 0 adds k0² + k1²/2, rank 1 k1²/2 +
        # k2².
        squares = all_reduce((rows.float().square() * share).sum(-1, keepdim=True), group)
        scale = torch.rsqrt(squares / size + epsilon)
        ctx.save_for_backward(rows, weight, scale)
        ctx.share = share
        ctx.size = size
        ctx.group = group
        return weight * (rows.float() * scale).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, scale = ctx.saved_tensors
        normed = rows.float() * scale
        normed_gradient = (gradient * weight).float()
        projection = (
            all_reduce((normed_gradient * normed).sum(-1, keepdim=True), ctx.group) / ctx.size
        )
        # Ranks that share a head each have the gradient of their own queries, which are added up
        # later in the weights' and the input's gradients. The projection counts once there, hence
        # its share.
        rows_gradient = ((normed_gradient - normed * projection * ctx.share) * scale).to(rows.dtype)
        return (
            rows_gradient,
            _weight_gradient(gradient, rows, scale).to(weight.dtype),
            None,
            None,
            None,
            None,
        )


class SplitRMSNorm(nn.Module):
    """RMSNorm over the features of all heads together, of which a rank has some.

    [b, heads, s, d] → the same.

    Ranks may share heads (see `GroupedQKV`). Each then counts such a head in part, and the weight's
    gradient is partial.

    Args:
        heads_by_rank: heads of each TP rank.
        size: features of a head, d.
    """

    def __init__(
        self, make: ParameterMaker, heads_by_rank: Sequence[range], size: int, epsilon: float
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
        self.weight = make.parameter("weight", (self.total,), layout, ConstantInit(1.0))

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
            _rows(joined), weight, share, self.total, self.epsilon, self.group
        )
        return normed.view(*joined.shape[:2], -1, self.size).permute(1, 2, 0, 3)


NORMS: dict[str, type[Norm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
