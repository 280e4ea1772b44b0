"""The MLP: first weight split by columns, second by rows (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.context import ForwardContext
from zero_tp.parallel.elementwise import ElementwiseModule, ElementwiseOps, compiled_with
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import ConstantInit, ExactBuffers, Normal, ParameterMaker


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


def _clamped_product(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(gate * alpha))


def _clamped(intermediate: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = intermediate.chunk(2, -1)
    return _clamped_product(gate, up, alpha, limit)


@compiled_with(max_complex_pointwise_cat_inputs=1)
def _clamped_gradient(intermediate: Tensor, gradient: Tensor, alpha: float, limit: float) -> Tensor:
    function = partial(_clamped_product, alpha=alpha, limit=limit)
    pull = torch.func.vjp(function, *intermediate.chunk(2, -1))[1]
    return torch.cat(pull(gradient), -1)


class _Gate(torch.autograd.Function):
    """Compute the product of gate and up; backward recomputes it.

    Its functions are that product and its gradient, with what they take besides tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        intermediate: Tensor,
        functions: tuple[Callable[..., Tensor], Callable[..., Tensor]],
        others: tuple[Any, ...],
        ops: ElementwiseOps,
    ) -> Tensor:
        # The gate's activation and the product are elementwise functions of it. autograd would keep
        # the activation's output, too.
        ctx.save_for_backward(intermediate)
        product, ctx.gradient = functions
        ctx.others = others
        ctx.ops = ops
        # [s, b, 2n] as rows: a chunk of them fits the cache (parallel/elementwise.py).
        output: Tensor = ops.map_rows(
            product, (intermediate.reshape(-1, intermediate.shape[-1]),), *others
        )
        return output.view(*intermediate.shape[:-1], output.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (intermediate,) = ctx.saved_tensors
        rows = [tensor.reshape(-1, tensor.shape[-1]) for tensor in (intermediate, gradient)]
        return (
            ctx.ops.map_rows(ctx.gradient, rows, *ctx.others).view(intermediate.shape),
            None,
            None,
            None,
        )


class GatedActivation(Activation):
    """activation(gate) · up of a tensor that holds both. [*, 2n] → [*, n].

    Backward keeps only that tensor.
    """

    def forward(self, intermediate: Tensor) -> Tensor:
        functions = (_gated, _gated_gradient)
        output: Tensor = _Gate.apply(intermediate, functions, (self.function,), self.elementwise)
        return output


class ClampedGatedActivation(ElementwiseModule):
    """g · σ(αg) · (u + 1), with the gate g at most `limit` and up u in [-limit, limit]: the clamped
    SwiGLU of gpt-oss (arXiv 2508.10925, section 2.1). [*, 2n] → [*, n].

    Backward keeps only the tensor that holds both.
    """

    def __init__(self, alpha: float, limit: float):
        super().__init__()
        self.alpha = alpha
        self.limit = limit

    def forward(self, intermediate: Tensor) -> Tensor:
        functions = (_clamped, _clamped_gradient)
        others = (self.alpha, self.limit)
        output: Tensor = _Gate.apply(intermediate, functions, others, self.elementwise)
        return output


XIELU_BETA, XIELU_EPSILON = 0.5, -1e-6
"""Their values in the paper and in every published file."""


def _xielu(tensor: Tensor, alphas: Tensor, beta: Tensor, epsilon: Tensor) -> Tensor:
    """Return xIELU of a tensor in fp32; `alphas` are the two parameters, [2]."""
    positive, negative = F.softplus(alphas)
    negative = beta + negative
    curve = torch.where(
        tensor > 0,
        positive * tensor * tensor,
        (torch.expm1(torch.minimum(tensor, epsilon)) - tensor) * negative,
    )
    return curve + beta * tensor


def _xielu_rows(tensor: Tensor, *others: Tensor) -> Tensor:
    return _xielu(tensor.float(), *others).to(tensor.dtype)


def _xielu_gradients(
    tensor: Tensor, gradient: Tensor, alphas: Tensor, beta: Tensor, epsilon: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the tensor, and of the parameters [2]."""

    def function(tensor: Tensor, alphas: Tensor) -> Tensor:
        return _xielu(tensor, alphas, beta, epsilon)

    pull = torch.func.vjp(function, tensor.float(), alphas)[1]
    rows_gradient, alphas_gradient = pull(gradient.float())
    return rows_gradient.to(tensor.dtype), alphas_gradient


class _XIELU(torch.autograd.Function):
    """Compute xIELU in fp32; backward recomputes it from its input."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        alpha_p: Tensor,
        alpha_n: Tensor,
        beta: Tensor,
        epsilon: Tensor,
        ops: ElementwiseOps,
    ) -> Tensor:
        ctx.save_for_backward(tensor, alpha_p, alpha_n, beta, epsilon)
        ctx.ops = ops
        others = (torch.cat((alpha_p, alpha_n)).float(), beta, epsilon)
        output: Tensor = ops.map_rows(_xielu_rows, (tensor.flatten(0, -2),), *others)
        return output.view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, alpha_p, alpha_n, beta, epsilon = ctx.saved_tensors
        others = (torch.cat((alpha_p, alpha_n)).float(), beta, epsilon)
        rows = (tensor.flatten(0, -2), gradient.flatten(0, -2))
        input_gradient, alphas_gradient = ctx.ops.map_and_sum_rows(_xielu_gradients, rows, *others)
        of_p, of_n = alphas_gradient.to(alpha_p.dtype).split(1)
        return input_gradient.view(tensor.shape), of_p, of_n, None, None, None


class XIELU(ExactBuffers, ElementwiseModule):
    """x ↦ α₊x² + βx above 0, α₋(exp(x) − 1 − x) + βx below, with learnt α (arXiv 2411.13010,
    equation 12). [*, h] → [*, h].

    Attributes:
        alpha_p, alpha_n: of which α₊ = softplus(alpha_p) and α₋ = β + softplus(alpha_n), [1].
        beta, eps: constants that files have; exp(x) − 1 is that of min(x, eps).
    """

    beta: Tensor
    eps: Tensor

    def __init__(self, make: ParameterMaker):
        super().__init__()
        # A rank has its own columns of the tensor only. Without TP nothing is summed, and
        # `layout.audit` refuses a partial gradient there.
        layout = Replicated("partial" if make.topology.tensor > 1 else "identical")
        # Where transformers begins: α₊ = 0.8 and α₋ = 0.8.
        for name, alpha in (("alpha_p", 0.8), ("alpha_n", 0.8 - XIELU_BETA)):
            init = ConstantInit(torch.tensor(alpha).expm1().log().item())
            self.register_parameter(name, make.parameter(name, (1,), layout, init))
        for name, value in (("beta", XIELU_BETA), ("eps", XIELU_EPSILON)):
            self.register_buffer(name, make.buffer(name, (1,), ConstantInit(value)))

    def forward(self, tensor: Tensor) -> Tensor:
        # transformers has the constants in the dtype of its activations.
        beta, eps = (constant.to(tensor.dtype).float() for constant in (self.beta, self.eps))
        output: Tensor = _XIELU.apply(
            tensor, self.alpha_p, self.alpha_n, beta, eps, self.elementwise
        )
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
        self.activation: nn.Module = Activation(spec.activation)
        self.down = RowParallelLinear(
            make.child("down"), spec.mlp_size, spec.hidden, bias=spec.mlp_bias, init=residual_init
        )

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        intermediate = self.up(tensor, sequence=context.sequence)
        return self.down(self.activation(intermediate), sequence=context.sequence)


class XIELUMLP(MLP):
    """An MLP whose activation is xIELU. [s, b, h] → [s, b, h], sequence shards under SP."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__(make, spec)
        self.activation = XIELU(make.child("activation"))


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
