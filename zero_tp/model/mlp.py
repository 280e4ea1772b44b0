"""The MLP: first weight split by columns, second by rows (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.context import ForwardContext
from zero_tp.parallel.elementwise import ElementwiseModule, ElementwiseOps, compiled_with
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker


class Activation(ElementwiseModule):
    """An elementwise function. [*] → [*]."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, intermediate: Tensor) -> Tensor:
        return self.function(intermediate)


def _gated(intermediate: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = intermediate.chunk(2, -1)
    return function(gate) * up


# Two plain stores; by default inductor's one kernel loads each input twice, masked.
@compiled_with(max_complex_pointwise_cat_inputs=1)
def _gated_gradient(
    intermediate: Tensor, gradient: Tensor, function: Callable[[Tensor], Tensor]
) -> Tensor:
    gate, up = intermediate.chunk(2, -1)
    # So any activation has a gradient, and torch can compile the whole function for `map_rows`.
    activated, gate_gradient = torch.func.vjp(function, gate)[:2]
    return torch.cat([*gate_gradient(gradient * up), gradient * activated], -1)


class _Gate(torch.autograd.Function):
    """Compute activation(gate) · up; backward recomputes it."""

    @staticmethod
    def forward(
        ctx: Any, intermediate: Tensor, function: Callable[[Tensor], Tensor], ops: ElementwiseOps
    ) -> Tensor:
        # The gate's activation and the product are elementwise functions of it. autograd would keep
        # the activation's output, too.
        ctx.save_for_backward(intermediate)
        ctx.function = function
        ctx.ops = ops
        # [s, b, 2n] as rows: a chunk of them fits the cache (parallel/elementwise.py).
        output: Tensor = ops.map_rows(
            _gated, (intermediate.reshape(-1, intermediate.shape[-1]),), function
        )
        return output.view(*intermediate.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (intermediate,) = ctx.saved_tensors
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (intermediate, gradient)]
        return (
            ctx.ops.map_rows(_gated_gradient, rows, ctx.function).view(intermediate.shape),
            None,
            None,
        )


class GatedActivation(Activation):
    """activation(gate) · up of a tensor that holds both. [*, 2n] → [*, n].

    Backward keeps only that tensor.
    """

    def forward(self, intermediate: Tensor) -> Tensor:
        output: Tensor = _Gate.apply(intermediate, self.function, self.elementwise)
        return output


class MLP(nn.Module):
    """h → 4h → activation → h. [s, b, h] → [s, b, h], sequence shards under SP."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        init = Normal(spec.init_std)
        residual_init = Normal(spec.residual_std)
        self.up = ColumnParallelLinear(
            make.child("up"), spec.hidden, (spec.mlp_size,), bias=spec.mlp_bias, init=init
        )
        self.activation = Activation(spec.activation)
        self.down = RowParallelLinear(
            make.child("down"), spec.mlp_size, spec.hidden, bias=spec.mlp_bias, init=residual_init
        )

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        intermediate = self.up(tensor, sequence=context.sequence)
        return self.down(self.activation(intermediate), sequence=context.sequence)


class GatedMLP(nn.Module):
    """(activation(x Wᵍ) · x Wᵘ) Wᵈ, gate and up in one weight (arXiv 2002.05202, equation 6).

    [s, b, h] → [s, b, h], sequence shards under SP.

    Args:
        size: its width; by default `mlp_size`.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, size: int | None = None):
        super().__init__()
        init = Normal(spec.init_std)
        residual_init = Normal(spec.residual_std)
        size = size or spec.mlp_size
        # One weight, so that the input is gathered once (g) and multiplied once. Its two parts are
        # split each by itself: with TP 2 rank 0 has the first half of gate's rows and the first
        # half of up's.
        columns = make.child("gate_up")
        self.gate_up = ColumnParallelLinear(
            columns, spec.hidden, (size, size), bias=spec.mlp_bias, init=init
        )
        self.activation = GatedActivation(spec.activation)
        self.down = RowParallelLinear(
            make.child("down"), size, spec.hidden, bias=spec.mlp_bias, init=residual_init
        )

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        intermediate = self.gate_up(tensor, sequence=context.sequence)
        return self.down(self.activation(intermediate), sequence=context.sequence)
