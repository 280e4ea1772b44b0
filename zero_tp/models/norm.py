"""Norms go over the last dimension, of whole activations [s, b, h] or of this rank's part of them: a sequence shard
[s/t, b, h] under SP, or the heads that the rank holds.

On a part each TP rank sees some of the rows only, so its gradients of weight and bias are parts, which are summed over
TP inside backward: one all-reduce for both, while the input's gradient is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.devices import cache_rows
from zero_tp.parallel.gradients import GradientSum
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Constant, ParameterMaker


class Norm(nn.Module):
    """A norm has a weight, and says what sums its gradient.

    Args:
        part: a rank sees a part of the rows.
    """

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, part: bool):
        super().__init__()
        self.epsilon = epsilon
        self.layout = Replicated("partial" if part else "identical")
        self.gradient_sum = GradientSum(make.topology.tensor_group) if part else None
        self.weight = make.make("weight", (size,), self.layout, Constant(1.0))


class _LayerNormOfPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, weight: Tensor, bias: Tensor, epsilon: float, total: GradientSum) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(part, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(part, mean, scale, weight, bias)
        ctx.total = total
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        part, mean, scale, weight, bias = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def of(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.native_layer_norm_backward(
                gradient, part, weight.shape, mean, scale, weight, bias, list(wanted)
            )

        reducing = ctx.total.start(*of(False, True, True)[1:]) if needs_weight or needs_bias else None
        input_gradient = of(True, False, False)[0] if needs_input else None
        weight_gradient, bias_gradient = reducing.wait() if reducing is not None else (None, None)
        return input_gradient, weight_gradient, bias_gradient, None, None


class LayerNorm(Norm):
    """This norm is layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, part: bool):
        super().__init__(make, size, epsilon, part=part)
        self.bias = make.make("bias", (size,), self.layout, Constant(0.0))

    def forward(self, tensor: Tensor) -> Tensor:
        if self.gradient_sum is None:
            return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.epsilon)
        output: Tensor = _LayerNormOfPart.apply(tensor, self.weight, self.bias, self.epsilon, self.gradient_sum)
        return output


class _RMSNorm(torch.autograd.Function):
    """Compute x / √(mean(x²) + ε) in fp32, rounded, times the weight. Backward keeps x and one number a row."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor, epsilon: float, total: GradientSum | None) -> Tensor:
        rows = tensor.reshape(-1, tensor.shape[-1])
        normed, scale = torch.empty_like(rows), torch.empty_like(rows[:, :1], dtype=torch.float32)
        for piece in cache_rows(rows):
            wide = rows[piece].float()
            scale[piece] = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
            torch.mul(weight, (wide * scale[piece]).to(tensor.dtype), out=normed[piece])
        ctx.save_for_backward(tensor, weight, scale)
        ctx.total = total
        return normed.view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        tensor, weight, scale = ctx.saved_tensors
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        rows, given = (each.reshape(-1, each.shape[-1]) for each in (tensor, gradient))
        reducing = weight_gradient = input_gradient = None
        if needs_weight:
            wide_gradient = torch.zeros_like(weight, dtype=torch.float32)
            for piece in cache_rows(rows):
                normed = (rows[piece].float() * scale[piece]).to(tensor.dtype)
                wide_gradient += (given[piece] * normed).sum(0, dtype=torch.float32)
            weight_gradient = wide_gradient.to(weight.dtype)
            reducing = ctx.total.start(weight_gradient) if ctx.total is not None else None
        if needs_input:
            input_gradient = torch.empty_like(rows)
            for piece in cache_rows(rows):
                normed = rows[piece].float() * scale[piece]
                wide = (given[piece] * weight).float()
                along = (wide * normed).mean(-1, keepdim=True)
                input_gradient[piece] = (wide - normed * along) * scale[piece]
            input_gradient = input_gradient.view(tensor.shape)
        if reducing is not None:
            (weight_gradient,) = reducing.wait()
        return input_gradient, weight_gradient, None, None


class RMSNorm(Norm):
    """This norm is root mean square normalisation (arXiv 1910.07467, equation 4), with a weight. [*, h] → [*, h]."""

    def forward(self, tensor: Tensor) -> Tensor:
        output: Tensor = _RMSNorm.apply(tensor, self.weight, self.epsilon, self.gradient_sum)
        return output


NORMS: dict[str, type[Norm]] = {"layer_norm": LayerNorm, "rms_norm": RMSNorm}
