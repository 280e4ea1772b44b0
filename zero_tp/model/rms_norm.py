"""Root mean square norms (arXiv 1910.07467), whose input and partial gradients are as in
model/layer_norm.py; split_rms_norm.py has those over features that are split over TP.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from zero_tp.model.layer_norm import Norm
from zero_tp.parallel.elementwise import ElementwiseModule, ElementwiseOps
from zero_tp.parallel.gradients import GradientSum
from zero_tp.parallel.parameter import ParameterMaker


class Scaling:
    """What follows x · 1/√(mean(x²) + ε) in a root mean square norm: Llama's rounding, then w."""

    @staticmethod
    def apply(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the norm's output. fp32 [n, h], [h] → [n, h] in `dtype`."""
        # transformers' LlamaRMSNorm rounds here; rounding once, after the weight, gives other bits.
        return weight * normed.to(dtype)

    @staticmethod
    def normed_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of `normed`, fp32 [n, h]."""
        return (gradient * weight).float()

    @staticmethod
    def weight_factor(normed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what the output's gradient is multiplied by for that of the weight. [n, h]"""
        return normed.to(dtype)


class WideScaling(Scaling):
    """The weight multiplies in fp32, and the product is rounded once (OLMo 2)."""

    @staticmethod
    def apply(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return (weight.float() * normed).to(dtype)

    @staticmethod
    def normed_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient.float() * weight.float()

    @staticmethod
    def weight_factor(normed: Tensor, dtype: torch.dtype) -> Tensor:
        return normed


class OffsetScaling(WideScaling):
    """Times 1 + w, in fp32 (Gemma)."""

    @staticmethod
    def apply(normed: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        return (normed * (1.0 + weight.float())).to(dtype)

    @staticmethod
    def normed_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
        return gradient.float() * (1.0 + weight.float())


def _rms_norm(
    rows: Tensor, weight: Tensor | None, epsilon: float, scaling: type[Scaling]
) -> tuple[Tensor, Tensor]:
    """Return the normed rows [n, h], scaled, and 1/√(mean(x²) + ε), fp32 [n, 1]."""
    rows_fp32 = rows.float()
    scale = torch.rsqrt(rows_fp32.square().mean(-1, keepdim=True) + epsilon)
    normed = rows_fp32 * scale
    return (
        normed.to(rows.dtype) if weight is None else scaling.apply(normed, weight, rows.dtype),
        scale,
    )


def _sum_and_norm(
    rows: Tensor, branch: Tensor, weight: Tensor | None, epsilon: float, scaling: type[Scaling]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows + branch, and what `_rms_norm` returns of that."""
    total = rows + branch
    return total, *_rms_norm(total, weight, epsilon, scaling)


def _weight_gradient(
    gradient: Tensor, rows: Tensor, scale: Tensor, scaling: type[Scaling]
) -> Tensor:
    """Return the gradient of the weight, fp32 [h]."""
    # The normed rows are computed again: they would be another activation of 2sbh bytes.
    factor = scaling.weight_factor(rows.float() * scale, rows.dtype)
    return (gradient * factor).sum(0, dtype=torch.float32)


def _rows_gradient(
    gradient: Tensor, rows: Tensor, scale: Tensor, weight: Tensor | None, scaling: type[Scaling]
) -> Tensor:
    """Return the gradient of the rows [n, h]."""
    return _exact_rows_gradient(gradient, rows, scale, weight, scaling).to(rows.dtype)


def _exact_rows_gradient(
    gradient: Tensor, rows: Tensor, scale: Tensor, weight: Tensor | None, scaling: type[Scaling]
) -> Tensor:
    """Return the gradient of the rows, fp32 [n, h]."""
    # With n = x·scale and g = dY·w: dx = (g - n · mean(g · n)) · scale.
    normed = rows.float() * scale
    normed_gradient = (
        gradient.float() if weight is None else scaling.normed_gradient(gradient, weight)
    )
    projection = (normed_gradient * normed).mean(-1, keepdim=True)
    return (normed_gradient - normed * projection) * scale


def _gradients(
    gradient: Tensor, rows: Tensor, scale: Tensor, weight: Tensor, scaling: type[Scaling]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight. Compiled it reads the rows once."""
    return (
        _rows_gradient(gradient, rows, scale, weight, scaling),
        _weight_gradient(gradient, rows, scale, scaling),
    )


def _rows_gradient_of_both(
    gradient: Tensor,
    rows: Tensor,
    scale: Tensor,
    residual_gradient: Tensor,
    weight: Tensor | None,
    scaling: type[Scaling],
) -> Tensor:
    """Return the gradient of rows that go on as a residual, too. It is rounded once."""
    exact = _exact_rows_gradient(gradient, rows, scale, weight, scaling)
    return (exact + residual_gradient.float()).to(rows.dtype)


def _gradients_of_both(
    gradient: Tensor,
    rows: Tensor,
    scale: Tensor,
    residual_gradient: Tensor,
    weight: Tensor,
    scaling: type[Scaling],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of such rows and of the weight."""
    return (
        _rows_gradient_of_both(gradient, rows, scale, residual_gradient, weight, scaling),
        _weight_gradient(gradient, rows, scale, scaling),
    )


class _RMSNorm(torch.autograd.Function):
    """Compute x / √(mean(x²) + ε) in fp32, scaled by the weight if there is one. Backward keeps x
    and one number per row.

    With `residual` it returns x, too, so that one kernel adds both gradients. With a branch it is
    first added to x, in the same kernel:

        forward     x, branch → x + branch (the residual), norm(x + branch)
        backward    the residual's gradient + that of the norm's input, in fp32 → x and branch
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor | None,
        branch: Tensor | None,
        epsilon: float,
        scaling: type[Scaling],
        gradient_sum: GradientSum | None,
        ops: ElementwiseOps,
        residual: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if branch is None:
            normed, scale = ops.map_rows(_rms_norm, (_rows(tensor),), weight, epsilon, scaling)
        else:
            summands = (_rows(tensor), _rows(branch))
            total, normed, scale = ops.map_rows(_sum_and_norm, summands, weight, epsilon, scaling)
            tensor = total.view(tensor.shape)
        ctx.has_branch = branch is not None
        ctx.save_for_backward(tensor, weight, scale)
        ctx.scaling = scaling
        ctx.gradient_sum = gradient_sum
        ctx.ops = ops
        output: Tensor = normed.view(tensor.shape)
        if not residual:
            return output
        # An input that is returned has to be a view; a sum is a tensor of its own.
        return (tensor if ctx.has_branch else tensor.view_as(tensor)), output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *residual_gradients, gradient = gradients
        tensor, weight, scale = ctx.saved_tensors
        needs_input, needs_weight, needs_branch = ctx.needs_input_grad[:3]
        needs_input = needs_input or needs_branch
        rows = (_rows(gradient), _rows(tensor), scale)
        others = (weight, ctx.scaling)
        with_residual = (*rows, *map(_rows, residual_gradients))
        reducing = weight_gradient = input_gradient = None
        if needs_weight and needs_input and ctx.gradient_sum is None:
            together = _gradients_of_both if residual_gradients else _gradients
            input_gradient, weight_gradient = ctx.ops.map_and_sum_rows(
                together, with_residual, *others
            )
            weight_gradient = weight_gradient.to(weight.dtype)
        else:
            if needs_weight:
                # Its all-reduce runs while the input's gradient is computed.
                weight_gradient = ctx.ops.sum_rows(_weight_gradient, rows, ctx.scaling)
                weight_gradient = weight_gradient.to(weight.dtype)
                if ctx.gradient_sum is not None:
                    reducing = ctx.gradient_sum.start(weight_gradient)
            if needs_input:
                function = _rows_gradient_of_both if residual_gradients else _rows_gradient
                input_gradient = ctx.ops.map_rows(function, with_residual, *others)
            if reducing is not None:
                (weight_gradient,) = reducing.wait()
        if input_gradient is not None:
            input_gradient = input_gradient.view(tensor.shape)
        branch_gradient = input_gradient if ctx.has_branch else None
        return input_gradient, weight_gradient, branch_gradient, *(None,) * 5


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class RMSNorm(Norm):
    """Root mean square normalisation, with a weight. [*, h] → [*, h].

    Equation 4 of arXiv 1910.07467. With `residual` it returns (input, output), and the input is
    first the sum with a branch, if there is one.
    """

    passes_residual = True
    scaling: ClassVar[type[Scaling]] = Scaling

    def forward(
        self, tensor: Tensor, *, residual: bool = False, branch: Tensor | None = None
    ) -> Any:
        settings = (self.epsilon, self.scaling, self.gradient_sum, self.elementwise)
        return _RMSNorm.apply(tensor, self.weight, branch, *settings, residual)


class WideRMSNorm(RMSNorm):
    """RMSNorm whose weight multiplies before the only rounding. [*, h] → [*, h]."""

    scaling = WideScaling


class OffsetRMSNorm(RMSNorm):
    """RMSNorm times 1 + w; w begins at 0. [*, h] → [*, h]."""

    initial_weight = 0.0
    scaling = OffsetScaling


class WeightlessRMSNorm(ElementwiseModule):
    """RMSNorm without a weight. [*, h] → [*, h]."""

    passes_residual: ClassVar[bool] = True
    parameter_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__()
        self.epsilon = epsilon

    def forward(
        self, tensor: Tensor, *, residual: bool = False, branch: Tensor | None = None
    ) -> Any:
        settings = (self.epsilon, Scaling, None, self.elementwise)
        return _RMSNorm.apply(tensor, None, branch, *settings, residual)
