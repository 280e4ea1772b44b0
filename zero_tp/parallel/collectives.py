"""The collectives inside a layer, and the conjugate operators built on them.

Tensor parallelism uses f and f̄, sequence parallelism g and ḡ (arXiv 2205.05198, figures 4 and 5).
Each pair is conjugate: what one does forward the other does backward. A column-parallel layer runs
f or g itself, and overlaps its backward with GEMMs (linear.py).

With TP 2 and a sequence of 4 positions, rank 0 has the first line of each pair:

    f, backward    [a0 a1 a2 a3]            [a0+b0 a1+b1 a2+b2 a3+b3]
                   [b0 b1 b2 b3]     →      [a0+b0 a1+b1 a2+b2 a3+b3]

    g, forward     [x0 x1]                  [x0 x1 x2 x3]
                   [x2 x3]           →      [x0 x1 x2 x3]

    ḡ, forward     [a0 a1 a2 a3]            [a0+b0 a1+b1]
                   [b0 b1 b2 b3]     →      [a2+b2 a3+b3]

Shapes: s sequence, b batch, h hidden, t TP size. Activations are [s, b, h]; a sequence shard is
[s/t, b, h]. The group is always an argument; a group of one rank communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from zero_tp.parallel.cpu.reduce_scatter import start as reduce_scatter_on_cpu

Group = ProcessGroup | None
Collective = Callable[[Tensor, Group], Tensor]


def group_size(group: Group) -> int:
    """Return the number of ranks in the group; 1 when there is none."""
    return group.size() if group is not None else 1


def group_rank(group: Group) -> int:
    """Return this rank's number in the group; 0 when there is none."""
    return group.rank() if group is not None else 0


class Pending:
    """The result of an asynchronous collective. `wait()` returns it, after applying `finish` to
    it.
    """

    def __init__(
        self,
        tensor: Tensor,
        work: Work | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ):
        self._tensor = tensor
        self._work = work
        self._finish = finish

    def wait(self) -> Tensor:
        # Cleared first, because a layer may wait twice (a column layer does, for its gather):
        # `finish` changes the tensor in place and must run once.
        work = self._work
        finish = self._finish
        self._work = None
        self._finish = None
        if work is not None:
            work.wait()
        if finish is not None:
            self._tensor = finish(self._tensor)
        return self._tensor


def start_all_reduce(tensor: Tensor, group: Group, *, async_op: bool = True) -> Pending:
    """Sum over the group, in place. [*] → [*]."""
    if group_size(group) == 1:
        return Pending(tensor)
    return Pending(tensor, dist.all_reduce(tensor, group=group, async_op=async_op))


def start_all_gather(tensor: Tensor, group: Group, *, async_op: bool = True) -> Pending:
    """Concatenate the ranks' tensors along dimension 0. [n, *] → [t·n, *]."""
    size = group_size(group)
    if size == 1:
        return Pending(tensor)
    gathered = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    return Pending(
        gathered,
        dist.all_gather_single(gathered, tensor.contiguous(), group=group, async_op=async_op),
    )


def start_reduce_scatter(tensor: Tensor, group: Group, *, async_op: bool = True) -> Pending:
    """Sum over the group and keep this rank's piece of dimension 0. [t·n, *] → [n, *]."""
    size = group_size(group)
    if size == 1:
        return Pending(tensor)
    if tensor.shape[0] % size:
        raise ValueError(f"reduce-scatter: {tensor.shape[0]} rows do not split over {size} ranks")
    if tensor.device.type == "cpu":
        return Pending(*reduce_scatter_on_cpu(tensor, group, size, async_op=async_op))
    piece = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    return Pending(
        piece,
        dist.reduce_scatter_single(piece, tensor.contiguous(), group=group, async_op=async_op),
    )


# Unlike a start and a wait, `async_op=False` runs NCCL's kernel on the current stream: torch 2.13
# records no events and holds no references to tensors (ProcessGroupNCCL::collective).


def all_reduce(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the group, in place. [*] → [*]."""
    return start_all_reduce(tensor, group, async_op=False).wait()


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Concatenate along dimension 0. [n, *] → [t·n, *]."""
    return start_all_gather(tensor, group, async_op=False).wait()


def reduce_scatter(tensor: Tensor, group: Group) -> Tensor:
    """Sum over the group, keep this rank's piece of dimension 0. [t·n, *] → [n, *]."""
    return start_reduce_scatter(tensor, group, async_op=False).wait()


def _copy(tensor: Tensor, _: Group) -> Tensor:
    return tensor.view_as(tensor)


def _sum_copy(tensor: Tensor, group: Group) -> Tensor:
    # A copy, because the sum is in place: autograd may hand the same gradient to other functions,
    # and forward's tensor is still the caller's.
    return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)


class _Conjugate(torch.autograd.Function):
    """Run one collective forward and another backward."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, group: Group, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.group = group
        ctx.collective = backward
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.collective(gradient, ctx.group), None, None, None


def _conjugate(tensor: Tensor, group: Group, forward: Collective, backward: Collective) -> Tensor:
    return tensor if group_size(group) == 1 else _Conjugate.apply(tensor, group, forward, backward)


def copy_to_tensor_region(tensor: Tensor, group: Group) -> Tensor:
    """Enter a tensor-parallel region (f): forward identity; backward all-reduce over the TP
    group. [*] → [*].
    """
    # Each rank multiplies the whole input by its shard of the weight, so the input's gradient is
    # the sum of the ranks' gradients.
    return _conjugate(tensor, group, _copy, _sum_copy)


def reduce_from_tensor_region(tensor: Tensor, group: Group) -> Tensor:
    """Leave a tensor-parallel region (f̄): forward all-reduce over the TP group; backward
    identity. [*] → [*].
    """
    # Of y = Σ yᵢ the derivative by each yᵢ is 1, and every rank already has the whole gradient of
    # y.
    return _conjugate(tensor, group, _sum_copy, _copy)


def gather_from_sequence_region(tensor: Tensor, group: Group) -> Tensor:
    """Gather (g): forward all-gather along the sequence, backward reduce-scatter. [s/t, b, h] →
    [s, b, h].
    """
    # Each rank has used the whole sequence: the gradient of a shard is the sum of what all ranks
    # have computed for it.
    return _conjugate(tensor, group, all_gather, reduce_scatter)


def reduce_scatter_to_sequence_region(tensor: Tensor, group: Group) -> Tensor:
    """Scatter sums (ḡ): forward reduce-scatter along the sequence, backward all-gather. [s, b,
    h] → [s/t, b, h].
    """
    # A rank's addend of the whole sequence reaches the shards of all ranks, so it needs all of
    # their gradients.
    return _conjugate(tensor, group, reduce_scatter, all_gather)


def gather_rows(tensor: Tensor, positions: Tensor, group: Group, *, sequence: bool) -> Tensor:
    """Gather n rows of the whole [s, b, h] on every rank. [s, b, h], or [s/t, b, h] when `sequence`
    → [n, h].

    Under SP each rank contributes its own rows and zeros for the others (f̄): forward all-reduce of
    [n, h], backward identity, because every rank has the whole gradient of the rows.

    With TP 2, a sequence of 6 and one row of the batch, positions 1, 4, 5 are, before the sum:

        rank 0 (positions 0 to 2)    x1  0   0
        rank 1 (positions 3 to 5)    0   x4  x5

    Args:
        positions: row indices of the whole tensor with its first two dimensions flattened, [n].
    """
    rows = tensor.flatten(0, 1)
    if not sequence or group_size(group) == 1:
        return rows[positions]
    # Row 0 stands for another rank's row, because an index must be in range; its values are masked,
    # and so are their gradients.
    local = positions - group_rank(group) * len(rows)
    remote = (local < 0) | (local >= len(rows))
    partial_rows = rows[local.masked_fill(remote, 0)].masked_fill(remote.unsqueeze(1), 0.0)
    return reduce_from_tensor_region(partial_rows, group)
