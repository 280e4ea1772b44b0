"""Linear layers of E groups, such as experts.

Rows are sorted by group, and each is multiplied by its group's matrix.
n tokens, each copied to k groups; the rows are these copies, sorted by group. i, o: features of
this rank's shard.

If torch has no grouped kernel for the operands, the host reads where groups end and multiplies them
one by one. On CUDA the kernel takes bf16 rows whose size is a multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from zero_tp.parallel.collectives import Group, all_gather, start_all_gather, start_reduce_scatter
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.parameter import Normal, ParameterMaker


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
    """Multiply each row by its group's matrix. [n·k, i], [E, i, o] → [n·k, o]."""
    if _has_grouped_kernel(rows, matrices, matrices.mT):
        return F.grouped_mm(rows, matrices, offs=ends)
    # No row is left unwritten: the last group's end is the number of rows.
    output = rows.new_empty(len(rows), matrices.shape[2])
    for number, part in _group_slices(ends, len(rows)):
        torch.mm(rows[part], matrices[number], out=output[part])
    return output


def grouped_outer_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Return leftᵀ · right of each group's rows. [n·k, o], [n·k, i] → [E, o, i]."""
    if _has_grouped_kernel(left, right):
        return F.grouped_mm(left.t(), right, offs=ends)
    # Zeros, because a group may have no rows.
    output = left.new_zeros(len(ends), left.shape[1], right.shape[1])
    for number, part in _group_slices(ends, len(left)):
        torch.mm(left[part].t(), right[part], out=output[number])
    return output


class _ColumnParallelGrouped(torch.autograd.Function):
    """Compute Y[row] = X[its token] W_eᵀ. Only X is saved; backward gathers it and copies its
    rows again.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, weight: Tensor, routing: Routing, group: Group, sequence: bool
    ) -> Tensor:
        # The parameter itself, not a view of it: ZeRO-3 frees its data until backward.
        ctx.save_for_backward(tensor, weight, *routing)
        ctx.group = group
        ctx.sequence = sequence
        whole = all_gather(tensor, group) if sequence else tensor
        return grouped_product(whole.flatten(0, 1)[routing.token_of_row], weight.mT, routing.ends)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensor, weight, *sorting = ctx.saved_tensors
        routing = Routing(*sorting)
        needs_input, needs_weight = ctx.needs_input_grad[:2]
        # F.grouped_mm refuses an expanded gradient, such as a sum's.
        gradient = gradient.contiguous()
        # As in a column layer (linear.py): the gather runs during the input-gradient product, the
        # reduce-scatter during the weight-gradient product.
        gathering = start_all_gather(tensor, ctx.group) if ctx.sequence and needs_weight else None
        input_gradient = weight_gradient = reducing = None
        if needs_input:
            row_gradient = grouped_product(gradient, weight, routing.ends)
            input_gradient = (
                row_gradient[routing.row_of_copy].sum(1).unflatten(0, (-1, tensor.shape[1]))
            )
        # Before the next collective starts, so that all ranks have one order of collectives.
        whole = tensor if gathering is None else gathering.wait()
        if input_gradient is not None and ctx.sequence:
            reducing = start_reduce_scatter(input_gradient, ctx.group)
        if needs_weight:
            rows = whole.flatten(0, 1)[routing.token_of_row]
            weight_gradient = grouped_outer_product(gradient, rows, routing.ends)
        return (
            input_gradient if reducing is None else reducing.wait(),
            weight_gradient,
            None,
            None,
            None,
        )


class _RowParallelGrouped(torch.autograd.Function):
    """Compute Y[token] = Σ over its rows of routing weight · (X[row] W_eᵀ), added in fp32 and
    rounded once.

    No product is saved: the gradient of a row's routing weight is X[row] · (W_eᵀ G[its token]), a
    partial sum over TP.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, routing_weights: Tensor, routing: Routing
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, routing_weights, *routing)
        outputs = grouped_product(rows, weight.mT, routing.ends)
        return (outputs[routing.row_of_copy] * routing_weights.unsqueeze(-1)).sum(1).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, routing_weights, *sorting = ctx.saved_tensors
        routing = Routing(*sorting)
        # Every copy of a token gets the token's gradient, in the order of rows.
        copies = gradient[routing.token_of_row]
        sorted_weights = routing_weights.flatten()[routing.copy_of_row].unsqueeze(1)
        # One product serves two gradients: times the routing weight it is the row's, times the row
        # the routing weight's.
        unweighted = grouped_product(copies, weight, routing.ends)
        routing_gradient = (unweighted.float() * rows).sum(1)[routing.row_of_copy]
        row_gradient = (unweighted * sorted_weights).to(rows.dtype)
        weight_gradient = None
        if ctx.needs_input_grad[1]:
            weight_gradient = grouped_outer_product(
                (copies * sorted_weights).to(rows.dtype), rows, routing.ends
            )
        return row_gradient, weight_gradient, routing_gradient, None


class _GroupedLinear(nn.Module):
    """Matrices of E groups in one weight [E, o, i], split over TP by `layout`."""

    def __init__(
        self,
        make: ParameterMaker,
        groups: int,
        inputs: int,
        outputs: int,
        layout: Sharded,
        init: Normal,
    ):
        super().__init__()
        self.weight = make.parameter("weight", (groups, outputs, inputs), layout, init)
        self.group = make.topology.tensor_group


class ColumnParallelGroupedLinear(_GroupedLinear):
    """Split every group's matrix by columns. [s, b, i] → [n·k, o], rows sorted by group; [s/t, b,
    i] under SP.

    Under SP, forward all-gathers the input (g). Backward gathers it again during the input-gradient
    product, and reduce-scatters that gradient during the weight-gradient product. Without SP the
    caller sums it over TP (f).
    """

    def forward(self, tensor: Tensor, routing: Routing, *, sequence: bool) -> Tensor:
        output: Tensor = _ColumnParallelGrouped.apply(
            tensor, self.weight, routing, self.group, sequence
        )
        return output


class RowParallelGroupedLinear(_GroupedLinear):
    """Split every group's matrix by rows; the caller sums the output over TP. [n·k, i], fp32 [n,
    k] → [n, o].
    """

    def forward(self, rows: Tensor, weights: Tensor, routing: Routing) -> Tensor:
        output: Tensor = _RowParallelGrouped.apply(rows, self.weight, weights, routing)
        return output
