"""Column-parallel, row-parallel and replicated linear layers (arXiv 1909.08053, section 3;
2205.05198, section 4.2).

s sequence, b batch, i input features, o output features, t TP size. The input of a column layer and
the output of a row layer are whole without SP, [s, b, ·]; under SP they are sequence shards, [s/t,
b, ·].

Communication of one layer, forward and backward, over the TP group:

| layer | SP | forward | backward |
| --- | --- | --- | --- |
| column | off | – (f) | all-reduce of the input gradient, during dW |
| column | on | all-gather of the input (g), during own rows | both collectives below |
| row | off | all-reduce of the output (f̄) | – |
| row | on | reduce-scatter of the output (ḡ) | all-gather of its gradient, during own rows |

"During own rows" means during the GEMM of the rank's own rows, dW that of the weight's gradient.

The bias of a row layer is added once, after the reduction. Under SP its gradient is summed from the
gathered output gradient, so every rank has the whole of it without more communication.

Backward of a column layer under SP, X = g(shard), Y = X Wᵀ, in the order of time:

    GEMM           dX = dY W                         dW = dYᵀ X
    collective     all-gather of the shard, X        reduce-scatter of dX

Without SP the input X was saved whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.collectives import (
    Group,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from zero_tp.parallel.layout import Replicated, Sharded
from zero_tp.parallel.parameter import ConstantInit, Normal, ParameterMaker
from zero_tp.parallel.topology import Topology

# 2,048 rows of 768 in bf16 by a matrix of 2,048 columns, on two ranks: 16.6 ms, and 19.4 ms
# gathered first. The product alone takes 15.2 ms (benchmarks/tried.md).
OWN_ROWS_FIRST = True
"""Multiply a rank's own rows while the others are gathered; otherwise all rows at once
afterwards.
"""


def _linear(tensor: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply as one matrix, and round once, after the bias. [*, i], [o, i] → [*, o].

    DeepSpeed's `zero.Init` replaces `F.linear`: with more than two dimensions its product is
    rounded before the bias.
    """
    return F.linear(tensor.flatten(0, -2), weight, bias).unflatten(0, tensor.shape[:-1])


def _all_gather_matmul(
    shard: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: Group,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """All-gather a sequence shard; multiply its own rows while the rest arrives (`OWN_ROWS_FIRST`).

    Each row equals the same row of a single GEMM over all rows, up to the order of its sums. On
    rank 1 of 3, where x0, x1, x2 are the ranks' shards:

        gather       .  x1  .            x0 x1 x2
        products     .  y1  .            y0 .  y2         each is written at its place in [s, b, o]
                     while it runs       after it

    Args:
        shard: [s/t, b, i].
        matrices: [i, o] each.
        biases: [o] each, or None.

    Returns:
        The gathered [s, b, i], and its products [s, b, o].
    """
    gathering = start_all_gather(shard, group)
    rows = shard.shape[0]
    rank = group_rank(group)
    size = group_size(group)
    outputs = tuple(
        shard.new_empty(size * rows, shard.shape[1], matrix.shape[1]) for matrix in matrices
    )

    def multiply(first: int, end: int, factor: Tensor) -> None:
        for output, matrix, bias in zip(outputs, matrices, biases, strict=True):
            # A view of the output, so that the products need no concatenation. addmm rounds once,
            # after the bias, as `_linear` does.
            product = output[first:end].flatten(0, 1)
            if bias is None:
                torch.mm(factor.flatten(0, 1), matrix, out=product)
            else:
                torch.addmm(bias, factor.flatten(0, 1), matrix, out=product)

    remaining = [(0, size * rows)]
    if OWN_ROWS_FIRST:
        multiply(rank * rows, (rank + 1) * rows, shard)
        remaining = [(0, rank * rows), ((rank + 1) * rows, size * rows)]
    gathered = gathering.wait()
    for first, end in remaining:
        if end > first:
            multiply(first, end, gathered[first:end])
    return gathered, outputs


class _ColumnParallel(torch.autograd.Function):
    """Compute Y_j = X W_jᵀ + b_j for one or several weights.

    Collectives of X and its gradient overlap with GEMMs (the module's table).
    Under SP only the input shard X_i is saved for backward, which gathers the whole input again.
    `rows` are the used rows of each weight (None: all); the gradient of the others is zero. With 8
    query heads, 2 KV heads and TP 4, every rank has the whole K, and uses the rows of one head:

        rank 0: head 0    rank 1: head 0    rank 2: head 1    rank 3: head 1

    The zeros let a gradient hook sum the heads' gradients over TP.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: Group,
        sequence: bool,
        rows: tuple[slice | None, ...],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights = parameters[: len(rows)]
        biases = parameters[len(rows) :]
        # The parameters themselves, not views of their rows: ZeRO-3 frees a parameter's data until
        # backward.
        ctx.save_for_backward(tensor, *weights)
        ctx.group = group
        ctx.sequence = sequence
        ctx.rows = rows
        own_weights = [_used_rows(weight, used) for weight, used in zip(weights, rows, strict=True)]
        own_biases = [_used_rows(bias, used) for bias, used in zip(biases, rows, strict=True)]
        if sequence:
            matrices = [weight.t() for weight in own_weights]
            return _all_gather_matmul(tensor, matrices, own_biases, group)[1]
        return tuple(
            _linear(tensor, weight, bias)
            for weight, bias in zip(own_weights, own_biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tensor, *weights = ctx.saved_tensors
        needs_input = ctx.needs_input_grad[0]
        needs = ctx.needs_input_grad[4:]
        needs_weights = needs[: len(weights)]
        needs_biases = needs[len(weights) :]
        # Once here: both GEMMs need it as one matrix, and each would copy a strided gradient for
        # itself.
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        gathering = (
            start_all_gather(tensor, ctx.group) if ctx.sequence and any(needs_weights) else None
        )
        reducing = None
        if needs_input:
            layers = zip(gradients, weights, ctx.rows, strict=True)
            pairs = [(gradient, _used_rows(weight, used)) for gradient, weight, used in layers]
            # The gradients of several weights are added before they are sent: one collective, as
            # forward had one f or g.
            start = start_reduce_scatter if ctx.sequence else start_all_reduce
            input_gradient = _sum_of_products(pairs)
            if gathering is not None:
                gathering.wait()  # before the next collective starts: one order on every rank
            reducing = start(input_gradient, ctx.group)
        gathered = gathering.wait() if gathering is not None else tensor
        weight_gradients: list[Tensor | None] = [None] * len(weights)
        bias_gradients: list[Tensor | None] = [None] * len(weights)
        for index, (gradient, weight, used) in enumerate(
            zip(gradients, weights, ctx.rows, strict=True)
        ):
            if needs_weights[index]:
                weight_gradients[index] = _pad_rows(
                    gradient.flatten(0, 1).t() @ gathered.flatten(0, 1), used, weight.shape[0]
                )
            if needs_biases[index]:
                bias_gradients[index] = _pad_rows(gradient.sum((0, 1)), used, weight.shape[0])
        return (
            reducing.wait() if reducing is not None else None,
            *(None,) * 3,
            *weight_gradients,
            *bias_gradients,
        )


def _sum_of_products(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return Σ gradient · weight; each product after the first is accumulated by its GEMM.

    [s, b, o], [o, i] → [s, b, i]. The last weight comes first, as in autograd's order.
    """
    (gradient, weight), *others = pairs[::-1]
    total = gradient @ weight
    for gradient, weight in others:
        rows = total.flatten(0, 1)
        # Not `addmm_`, which torch's counter of FLOPs does not know.
        torch.addmm(rows, gradient.flatten(0, 1), weight, out=rows)
    return total


def _used_rows(parameter: Any, rows: slice | None) -> Any:
    return parameter if parameter is None or rows is None else parameter[rows]


def _pad_rows(gradient: Tensor, rows: slice | None, total: int) -> Tensor:
    if rows is None:
        return gradient
    padded = gradient.new_zeros(total, *gradient.shape[1:])
    padded[rows] = gradient
    return padded


class _RowParallel(torch.autograd.Function):
    """Compute f̄(X Wᵀ) + b, or under SP ḡ(X Wᵀ) + b.

    [s, b, i/t] → [s, b, o], or [s/t, b, o] under SP.

    X is saved as it is. `F.linear` would save a contiguous copy of a strided X, such as the output
    of fused attention: 2sbh/t more bytes.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor, bias: Tensor | None, group: Group, sequence: bool
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group = group
        ctx.sequence = sequence
        # As one matrix: with a strided X torch would compute s products of b rows (bf16 on CPU, s
        # 256, b 4, i 256, o 256: 28 ms instead of 0.6).
        matrix = tensor.flatten(0, 1)
        rows = tensor.shape[:2]
        if group_size(group) == 1:
            return F.linear(matrix, weight, bias).unflatten(0, rows)
        # Without the bias: the sum over TP would contain it t times.
        partial = F.linear(matrix, weight).unflatten(0, rows)
        output = reduce_scatter(partial, group) if sequence else all_reduce(partial, group)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Backward of ḡ is a gather of dY, which both GEMMs need whole. Without SP f̄'s backward is
        # the identity: nothing is sent.
        if ctx.sequence:
            matrices = [weight] if needs_input else []
            no_biases = [None] * len(matrices)
            gathered, input_gradients = _all_gather_matmul(gradient, matrices, no_biases, ctx.group)
        else:
            gathered = gradient
            input_gradients = (gradient @ weight,) if needs_input else ()
        return (
            input_gradients[0] if needs_input else None,
            gathered.flatten(0, 1).t() @ tensor.flatten(0, 1) if needs_weight else None,
            gathered.sum((0, 1)) if needs_bias else None,
            None,
            None,
        )


def column_parallel_linear(
    tensor: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    topology: Topology,
    *,
    sequence: bool,
    rows: Sequence[slice | None] | None = None,
) -> tuple[Tensor, ...]:
    """Multiply [s, b, i] ([s/t, b, i] under SP) by each weight [o/t, i] → [s, b, o/t] each. f (g)
    once for all weights.

    Args:
        rows: the rows that this rank uses of each weight; by default all.
    """
    ranges = tuple(rows) if rows is not None else (None,) * len(weights)
    if group_size(topology.tensor_group) == 1 and len(weights) == 1:
        return (_linear(tensor, weights[0], biases[0]),)
    options = (topology.tensor_group, sequence, ranges)
    outputs: tuple[Tensor, ...] = _ColumnParallel.apply(tensor, *options, *weights, *biases)
    return outputs


class ColumnParallelLinear(nn.Module):
    """Linear layer split by output features; its input is whole or, under SP, a sequence shard.

    Args:
        inputs: i.
        parts: sizes of the fused outputs (Q, K, V; gate, up), each split by itself over TP.
        bias: split like the outputs.
    """

    def __init__(
        self, make: ParameterMaker, inputs: int, parts: tuple[int, ...], *, bias: bool, init: Normal
    ):
        super().__init__()
        layout = Sharded(0, parts)
        self.topology = make.topology
        self.weight = make.parameter("weight", (sum(parts), inputs), layout, init)
        self.bias = (
            make.parameter("bias", (sum(parts),), layout, ConstantInit(0.0)) if bias else None
        )

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        """Apply the layer. [s, b, i], or [s/t, b, i] when `sequence` → [s, b, o/t]."""
        (output,) = column_parallel_linear(
            tensor, (self.weight,), (self.bias,), self.topology, sequence=sequence
        )
        return output

    def multiply(self, tensor: Tensor) -> Tensor:
        """Apply the layer to a whole tensor that f or g has returned. [s, b, i] → [s, b, o/t]."""
        return _linear(tensor, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Linear layer split by input features; the replicated bias is added once, after the
    reduction.
    """

    def __init__(
        self, make: ParameterMaker, inputs: int, outputs: int, *, bias: bool, init: Normal
    ):
        super().__init__()
        self.topology = make.topology
        # Its columns meet the features that the column layer before it has left on this rank, so
        # nothing is sent between the two (arXiv 1909.08053, section 3).
        self.weight = make.parameter("weight", (outputs, inputs), Sharded(1, (inputs,)), init)
        self.bias = (
            make.parameter("bias", (outputs,), Replicated(), ConstantInit(0.0)) if bias else None
        )

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        """Apply the layer. [s, b, i/t] → [s, b, o], or [s/t, b, o] when `sequence`. f̄, or ḡ
        under SP.
        """
        options = (self.topology.tensor_group, sequence)
        output: Tensor = _RowParallel.apply(tensor, self.weight, self.bias, *options)
        return output


class ReplicatedLinear(nn.Module):
    """Linear layer with the same weight on every rank. [*, i] → [*, o].

    Args:
        sharded_input: a rank has some of the rows (SP); otherwise all ranks have the same.
    """

    def __init__(
        self,
        make: ParameterMaker,
        inputs: int,
        outputs: int,
        *,
        bias: bool = True,
        init: Normal,
        sharded_input: bool = False,
    ):
        super().__init__()
        layout = Replicated("partial" if sharded_input else "identical")
        self.weight = make.parameter("weight", (outputs, inputs), layout, init)
        self.bias = make.parameter("bias", (outputs,), layout, ConstantInit(0.0)) if bias else None

    def forward(self, tensor: Tensor) -> Tensor:
        return _linear(tensor, self.weight, self.bias)
