"""Linear layers of E groups, such as experts.

Rows are sorted by group, and each is multiplied by its group's matrix.
n tokens, each copied to k groups; the rows are these copies, sorted by group. i, o: features of
this rank's shard. r: rows of the groups that this rank has, n·k without expert parallelism.

If torch has no grouped kernel for the operands, the host reads where groups end and multiplies them
one by one. On CUDA the kernel takes bf16 rows whose size is a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zero_tp.parallel.collectives import (
    Group,
    Pending,
    all_gather,
    start_all_gather,
    start_reduce_scatter,
)
from zero_tp.parallel.elementwise import ElementwiseModule, ElementwiseOps
from zero_tp.parallel.expert_exchange import ExpertExchange
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.parameter import ConstantInit, Normal, ParameterMaker


class Routing(NamedTuple):
    """The permutation that sorts the copies of tokens by group, and its inverse.

    Of tokens a, b, c with k 2, whose groups are (0, 2), (1, 2), (0, 1), the copies 0 to 5 are
    a a b b c c:

        rows           a c | b c | a b       of groups 0, 1 and 2
        copy_of_row    0 4   2 5   1 3
        row_of_copy    [[0, 4], [2, 5], [1, 3]]
        ends           2, 4, 6

    Attributes:
        copy_of_row: copy number of each row, int64 [n·k]; copies 0 to k - 1 are of token 0, and so
            on.
        row_of_copy: row of each token's copies, int64 [n, k].
        ends: where each group's rows end, int32 [E].
    """

    copy_of_row: Tensor
    row_of_copy: Tensor
    ends: Tensor

    @classmethod
    def from_groups(cls, groups: Tensor, count: int) -> Routing:
        """Sort copies by group, stably. `groups`: the group of each copy, int64 [n, k], below
        `count`.
        """
        flat = groups.flatten()
        # Stable, so that a group's rows are in the order of tokens on every rank and in every run:
        # sums then have one order.
        copy_of_row = flat.argsort(stable=True)
        # Not `bincount`, which reads the greatest group on the host, and would wait for the device.
        sizes = torch.zeros(count, dtype=torch.int64, device=flat.device)
        sizes = sizes.scatter_add_(0, flat, torch.ones_like(flat))
        # F.grouped_mm takes ends in int32 only.
        return cls(
            copy_of_row, copy_of_row.argsort().view_as(groups), sizes.cumsum(0, dtype=torch.int32)
        )

    @property
    def token_of_row(self) -> Tensor:
        """Int64 [n·k]."""
        return self.copy_of_row // self.row_of_copy.shape[1]


class Route(NamedTuple):
    """Where the rows of a layer's tokens go.

    Attributes:
        chosen: indices of each token's experts, int64 [n, k].
    """

    chosen: Tensor
    routing: Routing
    experts: ExpertExchange


def _has_grouped_kernel(*operands: Tensor) -> bool:
    """Return whether `F.grouped_mm` takes the operands: rows of a multiple of 16 bytes; fake
    ones must be bf16.
    """
    dtype = operands[0].dtype
    if dtype != torch.bfloat16 and (
        is_fake(operands[0]) or dtype not in (torch.float32, torch.float16)
    ):
        return False
    return all(operand.shape[-1] * operand.element_size() % 16 == 0 for operand in operands)


def _group_slices(ends: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield the number and rows of each non-empty group. With fake tensors all groups have
    equally many rows.
    """
    count = len(ends)
    start = 0
    for number, end in enumerate(
        [rows * (e + 1) // count for e in range(count)] if is_fake(ends) else ends.tolist()
    ):
        if end > start:
            yield number, slice(start, end)
        start = end


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each row by its group's matrix. [r, i], [E, i, o] → [r, o]."""
    if len(rows) and _has_grouped_kernel(rows, matrices, matrices.mT):
        return F.grouped_mm(rows, matrices, offs=ends)
    # No row is left unwritten: the last group's end is the number of rows.
    output = rows.new_empty(len(rows), matrices.shape[2])
    for number, part in _group_slices(ends, len(rows)):
        torch.mm(rows[part], matrices[number], out=output[part])
    return output


def grouped_outer_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ · right of each group's rows. [r, o], [r, i] → [E, o, i]."""
    if len(left) and _has_grouped_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    # Zeros, because a group may have no rows.
    output = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for number, part in _group_slices(ends, len(left)):
        torch.mm(left[part].t(), right[part], out=output[number])
    return output


def vectors_of_rows(vectors: Tensor, ends: Tensor, rows: int) -> Tensor:
    """Return the vector of each row's group. [E, o] → [r, o]"""
    # Not `repeat_interleave`, which would wait for the device.
    numbers = torch.arange(rows, dtype=ends.dtype, device=ends.device)
    return vectors[torch.searchsorted(ends, numbers, right=True)]


def grouped_sum(rows: Tensor, ends: Tensor) -> Tensor:
    """Return the sum of each group's rows. [r, o] → [E, o]"""
    # 16 bytes a row are the least that the products' kernel takes. Its sums have one order, those
    # of `index_add_` have not.
    ones = rows.new_ones(len(rows), 16 // rows.element_size())
    if len(rows) and _has_grouped_kernel(rows, ones):
        return grouped_outer_product(rows, ones, ends)[..., 0].contiguous()
    output = rows.new_zeros(len(ends), rows.shape[1])
    for number, part in _group_slices(ends, len(rows)):
        torch.sum(rows[part], 0, out=output[number])
    return output


def dispatch_tokens(
    tensor: Tensor, routing: Routing, experts: ExpertExchange, group: Group, *, sequence: bool
) -> Pending:
    """Copy the tokens, gathered over TP under SP, and start to send them to their experts, without
    a graph. [s, b, i] → [r, i]; [s/t, b, i] under SP.
    """
    whole = tensor.detach()
    if sequence:
        whole = all_gather(whole, group)
    return experts.start_dispatch(whole.flatten(0, 1)[routing.token_of_row])


def _sum_copies_(output: Tensor, row_of_copy: Tensor, rows: Tensor) -> None:
    """Write the sum of the rows of each token's copies. [n, i], [n, k], all rows [n·k, i]."""
    output.copy_(rows[row_of_copy].sum(1))


def _sum_weighted_copies_(
    output: Tensor, row_of_copy: Tensor, weights: Tensor, rows: Tensor
) -> None:
    """Write the weighted sum of the rows of each token's copies, added in fp32. [n, o], [n, k],
    fp32 [n, k], all rows [n·k, o].
    """
    output.copy_((rows[row_of_copy] * weights.unsqueeze(-1)).sum(1))


def _weight_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """Return each row times its weight, rounded once. [r, o], fp32 [r, 1] → [r, o]."""
    return (rows * weights).to(rows.dtype)


def _project_rows(rows: Tensor, inputs: Tensor) -> Tensor:
    """Return each row's scalar product with its input. [r, i], [r, i] → fp32 [r]."""
    return (rows.float() * inputs).sum(1)


def _weight_and_project_rows(
    rows: Tensor, weights: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `_weight_rows` and `_project_rows`."""
    return _weight_rows(rows, weights), _project_rows(rows, inputs)


def _sum_of_copies(combined: Pending, routing: Routing, batch: int, ops: ElementwiseOps) -> Tensor:
    """Sum the rows of each token's copies. [n·k, i] → [s, b, i]."""
    rows = combined.wait()
    output = rows.new_empty(len(routing.row_of_copy), rows.shape[1])
    ops.map_rows(
        _sum_copies_,
        (output, routing.row_of_copy),
        rows,
        row_elements=routing.row_of_copy.shape[1] * rows.shape[1],
    )
    return output.unflatten(0, (-1, batch))


class _ColumnParallelGrouped(torch.autograd.Function):
    """Compute Y[row] = X[its token] W_eᵀ + b_e. Only X is saved; backward gathers it, copies its
    rows and sends them to their experts again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        routing: Routing,
        experts: ExpertExchange,
        dispatched: Pending | None,
        group: Group,
        sequence: bool,
        ops: ElementwiseOps,
    ) -> Tensor:
        # The parameter itself, not a view of it: ZeRO-3 frees its data until backward.
        ctx.save_for_backward(tensor, weight, *routing)
        ctx.ops = ops
        ctx.group = group
        ctx.sequence = sequence
        ctx.experts = experts
        if dispatched is None:
            dispatched = dispatch_tokens(tensor, routing, experts, group, sequence=sequence)
        product = grouped_product(dispatched.wait(), weight.mT, experts.ends)
        if bias is not None:
            product += vectors_of_rows(bias, experts.ends, len(product))
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, *sorting = ctx.saved_tensors
        routing = Routing(*sorting)
        experts: ExpertExchange = ctx.experts
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # F.grouped_mm refuses an expanded gradient, such as a sum's.
        gradient = gradient.contiguous()
        # As in a column layer (linear.py): the gather runs during the input-gradient product, the
        # reduce-scatter during the weight-gradient product.
        # Over expert ranks, rows travel during both products, and no reduce-scatter does.
        gathering = start_all_gather(tensor, ctx.group) if ctx.sequence and needs_weight else None
        dispatched = combined = input_gradient = weight_gradient = reducing = None
        if needs_weight and experts.is_remote:
            whole = tensor if gathering is None else gathering.wait()
            dispatched = experts.start_dispatch(whole.flatten(0, 1)[routing.token_of_row])
        if needs_input:
            combined = experts.start_combine(grouped_product(gradient, weight, experts.ends))
        if combined is not None and not experts.is_remote:
            input_gradient = _sum_of_copies(combined, routing, tensor.shape[1], ctx.ops)
        # Before the next collective starts, so that all ranks have one order of collectives.
        whole = tensor if gathering is None else gathering.wait()
        if input_gradient is not None and ctx.sequence:
            reducing = start_reduce_scatter(input_gradient, ctx.group)
        if needs_weight:
            if dispatched is None:
                dispatched = experts.start_dispatch(whole.flatten(0, 1)[routing.token_of_row])
            weight_gradient = grouped_outer_product(gradient, dispatched.wait(), experts.ends)
        if combined is not None and experts.is_remote:
            input_gradient = _sum_of_copies(combined, routing, tensor.shape[1], ctx.ops)
            if ctx.sequence:
                reducing = start_reduce_scatter(input_gradient, ctx.group)
        bias_gradient = grouped_sum(gradient, experts.ends) if needs_bias else None
        input_gradient = input_gradient if reducing is None else reducing.wait()
        return input_gradient, weight_gradient, bias_gradient, *[None] * 6


class _RowParallelGrouped(torch.autograd.Function):
    """Compute Y[token] = Σ over its rows of routing weight · (X[row] W_eᵀ + b_e), added in fp32
    and rounded once.

    A rank adds its columns `own` of the bias, which are the only ones it has. No product is saved:
    the gradient of a row's routing weight is X[row] · (W_eᵀ G[its token]) + b_e · G[its token], a
    partial sum over TP.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        routing_weights: Tensor,
        routing: Routing,
        experts: ExpertExchange,
        own: slice,
        ops: ElementwiseOps,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, routing_weights, *routing)
        ctx.experts = experts
        ctx.own = own
        ctx.ops = ops
        product = grouped_product(rows, weight.mT, experts.ends)
        if bias is not None:
            product[:, own] += vectors_of_rows(bias, experts.ends, len(product))
        outputs = experts.start_combine(product).wait()
        output = outputs.new_empty(len(routing_weights), outputs.shape[1], dtype=rows.dtype)
        by_token = output, routing.row_of_copy, routing_weights
        width = routing_weights.shape[1] * outputs.shape[1]
        ops.map_rows(_sum_weighted_copies_, by_token, outputs, row_elements=width)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias, routing_weights, *sorting = ctx.saved_tensors
        routing = Routing(*sorting)
        experts: ExpertExchange = ctx.experts
        # Every copy of a token gets the token's gradient, in the order of rows.
        dispatched = experts.start_dispatch(gradient[routing.token_of_row])
        sorted_weights = routing_weights.flatten()[routing.copy_of_row].unsqueeze(1)
        dispatched_weights = experts.start_dispatch(sorted_weights)
        copies = dispatched.wait()
        sorted_weights = dispatched_weights.wait()
        # One product serves two gradients: times the routing weight it is the row's, times the row
        # the routing weight's.
        unweighted = grouped_product(copies, weight, experts.ends)
        row_gradient, routing_gradient = ctx.ops.map_rows(
            _weight_and_project_rows, (unweighted, sorted_weights, rows)
        )
        del unweighted
        if bias is not None:
            own_bias = vectors_of_rows(bias, experts.ends, len(rows))
            routing_gradient += ctx.ops.map_rows(_project_rows, (copies[:, ctx.own], own_bias))
        combined = experts.start_combine(routing_gradient)
        weight_gradient = bias_gradient = None
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        if needs_weight or needs_bias:
            weighted = ctx.ops.map_rows(_weight_rows, (copies, sorted_weights))
        if needs_weight:
            weight_gradient = grouped_outer_product(weighted, rows, experts.ends)
        if needs_bias:
            bias_gradient = grouped_sum(weighted[:, ctx.own].contiguous(), experts.ends)
        gradients = (row_gradient, weight_gradient, bias_gradient)
        return *gradients, combined.wait()[routing.row_of_copy], *[None] * 4


class _GroupedLinear(ElementwiseModule):
    """Matrices of E groups in one weight [E, o, i], split over TP by `layout`, and their biases
    [E, o], split by the features o.
    """

    def __init__(
        self,
        make: ParameterMaker,
        groups: int,
        inputs: int,
        outputs: int,
        layout: Sharded,
        init: Normal,
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.weight = make.parameter("weight", (groups, outputs, inputs), layout, init)
        self.bias: nn.Parameter | None = None
        if bias:
            features = layout if layout.dim == 1 else replace(layout, dim=1, parts=(outputs,))
            self.bias = make.parameter("bias", (groups, outputs), features, ConstantInit(0.0))
        self.group = make.topology.tensor_group
        width = outputs // make.topology.tensor
        first = make.topology.tensor_rank * width
        self.own = slice(first, first + width)


class ColumnParallelGroupedLinear(_GroupedLinear):
    """Split every group's matrix by columns. [s, b, i] → [r, o], rows sorted by group; [s/t, b, i]
    under SP.

    Under SP, forward all-gathers the input (g). Backward gathers it again during the input-gradient
    product, and reduce-scatters that gradient during the weight-gradient product. Without SP the
    caller sums it over TP (f).
    """

    def forward(
        self,
        tensor: Tensor,
        routing: Routing,
        experts: ExpertExchange,
        *,
        sequence: bool,
        dispatched: Pending | None = None,
    ) -> Tensor:
        """Multiply.

        Args:
            dispatched: `dispatch_tokens`, if it was started before.
        """
        output: Tensor = _ColumnParallelGrouped.apply(
            tensor,
            self.weight,
            self.bias,
            routing,
            experts,
            dispatched,
            self.group,
            sequence,
            self.elementwise,
        )
        return output


class RowParallelGroupedLinear(_GroupedLinear):
    """Split every group's matrix by rows; the caller sums the output over TP. [r, i], fp32 [n, k]
    → [n, o].

    Each rank adds other features of the bias, so that the sum has each once. With TP 2 and o 4:

        rank 0    b0 b1 .  .
        rank 1    .  .  b2 b3
    """

    def forward(
        self, rows: Tensor, weights: Tensor, routing: Routing, experts: ExpertExchange
    ) -> Tensor:
        output: Tensor = _RowParallelGrouped.apply(
            rows, self.weight, self.bias, weights, routing, experts, self.own, self.elementwise
        )
        return output
