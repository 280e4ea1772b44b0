"""Norms over the last dimension. They act on whole activations [s, b, h] or on this rank's part of them: a sequence
shard [s/t, b, h] under SP, or the heads that the rank holds.

On a part each TP rank sees some of the rows only, so the gradients of weight and bias are summed over TP inside
backward: one all-reduce for both, while the input's gradient is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, start_all_reduce
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Constant, ParameterMaker


class _LayerNormOfPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor, epsilon: float, group: Group) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(shard, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(shard, mean, scale, weight, bias)
        ctx.group = group
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        shard, mean, scale, weight, bias = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def of(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.native_layer_norm_backward(
                gradient, shard, weight.shape, mean, scale, weight, bias, list(wanted)
            )

        reducing = None
        if needs_weight or needs_bias:
            _, weight_part, bias_part = of(False, True, True)
            reducing = start_all_reduce(torch.stack((weight_part, bias_part)), ctx.group)
        input_gradient = of(True, False, False)[0] if needs_input else None
        weight_gradient, bias_gradient = reducing.wait() if reducing is not None else (None, None)
        return input_gradient, weight_gradient, bias_gradient, None, None


class LayerNorm(nn.Module):
    """Layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, hidden: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.group = make.topology.tensor_group
        self.weight = make.make("weight", (hidden,), Replicated(), Constant(1.0))
        self.bias = make.make("bias", (hidden,), Replicated(), Constant(0.0))

    def forward(self, tensor: Tensor, *, part: bool) -> Tensor:
        """`part`: the tensor is this rank's part of the rows."""
        if part:
            return _LayerNormOfPart.apply(tensor, self.weight, self.bias, self.epsilon, self.group)
        return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.epsilon)


class _RMSNorm(torch.autograd.Function):
    """x / √(mean(x²) + ε) in fp32, rounded, times the weight. Backward keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, epsilon: float, group: Group, part: bool) -> Tensor:
        wide = tensor.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(tensor, weight, scale)
        ctx.group, ctx.part = group, part
        return weight * (wide * scale).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        tensor, weight, scale = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        normed = tensor.float() * scale
        reducing = weight_gradient = input_gradient = None
        if needs_weight:
            weight_gradient = (gradient * normed.to(tensor.dtype)).flatten(0, -2).sum(0)
            if ctx.part:
                reducing = start_all_reduce(weight_gradient, ctx.group)
        if needs_input:
            wide = (gradient * weight).float()
            along = (wide * normed).mean(-1, keepdim=True)
            input_gradient = ((wide - normed * along) * scale).to(tensor.dtype)
        if reducing is not None:
            weight_gradient = reducing.wait()
        return input_gradient, weight_gradient, None, None, None


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467, equation 4), with a weight. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, hidden: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.group = make.topology.tensor_group
        self.weight = make.make("weight", (hidden,), Replicated(), Constant(1.0))

    def forward(self, tensor: Tensor, *, part: bool) -> Tensor:
        """`part`: the tensor is this rank's part of the rows."""
        output: Tensor = _RMSNorm.apply(tensor, self.weight, self.epsilon, self.group, part)
        return output


NORMS: dict[str, type[LayerNorm] | type[RMSNorm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
