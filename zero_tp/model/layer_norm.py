"""A norm with a weight, and LayerNorm, of whole activations [s, b, h] or of this rank's part.

A part is a sequence shard [s/t, b, h] under SP, or the rank's heads. Then the gradients of weight
and bias are partial too, and backward sums them over TP: one all-reduce for both, while it computes
the input's gradient.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.gradients import GradientSum
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import ConstantInit, ParameterMaker


class Norm(ElementwiseModule):
    """A norm with a weight, and the sum of its partial gradient.

    Args:
        sharded_input: the input is this rank's part, so gradients of the weights are partial.

    Attributes:
        initial_weight: of every feature.
        parameter_names: in files, too.
        passes_residual: its forward takes `residual` and `branch`.
    """

    initial_weight: ClassVar[float] = 1.0
    parameter_names: ClassVar[tuple[str, ...]] = ("weight",)
    passes_residual: ClassVar[bool] = False

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__()
        self.epsilon = epsilon
        # LayerNorm's bias shares this layout and this sum.
        self.layout = Replicated("partial" if sharded_input else "identical")
        self.gradient_sum = GradientSum(make.topology.tensor_group) if sharded_input else None
        initial = ConstantInit(self.initial_weight)
        self.weight = make.parameter("weight", (size,), self.layout, initial)


class _PartialLayerNorm(torch.autograd.Function):
    """LayerNorm of this rank's tokens; backward sums the gradients of weight and bias over TP."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
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
        reducing = None
        if needs_weight or needs_bias:
            of_weights = gradients(False, True, bias is not None)[1:]
            reducing = ctx.gradient_sum.start(*of_weights[: 1 + (bias is not None)])
        input_gradient = gradients(True, False, False)[0] if needs_input else None
        weight_gradient, bias_gradient = (
            (*reducing.wait(), None)[:2] if reducing is not None else (None, None)
        )
        return input_gradient, weight_gradient, bias_gradient, None, None


class BiaslessLayerNorm(Norm):
    """Layer normalisation over h with a weight alone. [*, h] → [*, h]."""

    bias: nn.Parameter | None

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__(make, size, epsilon, sharded_input=sharded_input)
        self.register_parameter("bias", None)

    def factor(self) -> Tensor:
        """Return what multiplies the normed features, [h]."""
        return self.weight

    def forward(self, tensor: Tensor) -> Tensor:
        factor = self.factor()
        if self.gradient_sum is None:
            return F.layer_norm(tensor, factor.shape, factor, self.bias, self.epsilon)
        output: Tensor = _PartialLayerNorm.apply(
            tensor, factor, self.bias, self.epsilon, self.gradient_sum
        )
        return output


class LayerNorm(BiaslessLayerNorm):
    """Layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    parameter_names = ("weight", "bias")

    def __init__(self, make: ParameterMaker, size: int, epsilon: float, *, sharded_input: bool):
        super().__init__(make, size, epsilon, sharded_input=sharded_input)
        self.bias = make.parameter("bias", (size,), self.layout, ConstantInit(0.0))


class OffsetLayerNorm(LayerNorm):
    """LayerNorm times 1 + w, plus a bias (Nemotron). [*, h] → [*, h].

    As in transformers w begins at 1, not at 0, and 1 + w is rounded to its dtype.
    """

    def factor(self) -> Tensor:
        return 1 + self.weight
