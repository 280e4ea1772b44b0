"""Make parameters: name, shard, initialise, and set their layout.

Initial weights are the same for every TP size. A parameter is drawn on the CPU in fp32, in blocks
of rows along the split dimension; every block has its own generator, seeded by (run seed, parameter
name, block). A rank draws only the blocks of its shard, and TP 1, 2 and 4 start from the same bits.
Data-parallel ranks hold the same shards, so one of them draws each block. Of 160 rows in blocks of
64, at TP 2:

    blocks        0: rows 0 to 63      1: rows 64 to 127      2: rows 128 to 159
    TP rank 0     all of it            its first 16 rows
    TP rank 1                          its last 48 rows       all of it

Both draw block 1 whole, and each keeps its rows.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, group_rank, group_size
from zero_tp.parallel.layout import Layout, Replicated, copy_layout, has_layout, set_layout
from zero_tp.parallel.spans import Spans, zero_padding
from zero_tp.parallel.topology import Topology

BLOCK_ROWS = 64


@dataclass(frozen=True)
class Normal:
    """Elements from N(0, std²); the row `zero_row`, if any, is zeros."""

    std: float
    zero_row: int | None = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 elements on the CPU."""
        # zero.Init patches torch.empty and others to use the run's dtype, but not torch.normal.
        return torch.normal(
            0.0, self.std, tuple(shape), generator=generator, dtype=torch.float32, device="cpu"
        )


@dataclass(frozen=True)
class MappedUniform:
    """Elements f(u), u uniform in [low, high]."""

    low: float
    high: float
    function: Callable[[Tensor], Tensor]
    zero_row: ClassVar[int | None] = None

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return fp32 elements on the CPU."""
        values = torch.normal(0.0, 1.0, tuple(shape), generator=generator, dtype=torch.float32)
        # torch.rand, which zero.Init patches, would round to the run's dtype.
        return self.function(values.uniform_(self.low, self.high, generator=generator))


@dataclass(frozen=True)
class ConstantInit:
    """Every element is `value`."""

    value: float


Init = Normal | MappedUniform | ConstantInit


class WeightSource(Protocol):
    """Gives new parameters their values: from their `Init` (SeededInit), from files, or zeros."""

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        """Write this rank's shard of the parameter `name`, of the whole shape `whole`, into
        `local`.
        """


class RowOf(NamedTuple):
    """The other dimensions of a parameter's rows: their whole shape, and what a rank has of it."""

    shape: Sequence[int]
    elements: Sequence[slice]


def whole_slice(spans: Spans) -> slice:
    """Return the elements of the whole that a rank has along a dimension that no TP splits."""
    (span,) = spans
    return span.whole


@dataclass(frozen=True)
class SeededInit:
    """A source that draws weights by their `Init` and the run's seed."""

    seed: int

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        if isinstance(init, ConstantInit):
            local.fill_(init.value)
            return
        rank = topology.tensor_rank, topology.tensor, topology.expert_rank
        spans = layout.spans(whole, *rank)
        zero_padding(local, spans)
        # Blocks run along the split dimension, so that a shard consists of few of them.
        rows = local.movedim(layout.dim, 0)
        others = [dim for dim in range(len(whole)) if dim != layout.dim]
        row = RowOf([whole[dim] for dim in others], [whole_slice(spans[dim]) for dim in others])
        group = topology.expert_data_group if layout.experts > 1 else topology.data_group
        for span in spans[layout.dim]:
            where = span.whole_start, whole[layout.dim]
            self._draw(rows[span.local], name, *where, init, row, group)

    def _draw(
        self,
        rows: Tensor,
        name: str,
        start: int,
        total: int,
        init: Normal | MappedUniform,
        row: RowOf,
        group: Group,
    ) -> None:
        """Draw the parameter's rows from `start` on into `rows`, in blocks and fp32.

        Args:
            total: all the parameter's rows.
            group: the ranks that have the same rows.
        """
        stop = start + len(rows)
        for block in range(start // BLOCK_ROWS, -(-stop // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            last = min((block + 1) * BLOCK_ROWS, total)
            target = rows[max(first - start, 0) : last - start]
            if not len(target):
                continue
            # A seed for each block: no rank has to draw what lies before its shard.
            digest = hashlib.sha256(f"{self.seed}/{name}/{block}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            values = init.draw((last - first, math.prod(row.shape)), generator)
            # Whole rows are drawn, so that the values do not depend on the number of expert ranks.
            values = values.view(last - first, *row.shape)[:, *row.elements]
            if init.zero_row is not None and first <= init.zero_row < last:
                values[init.zero_row - first] = 0.0
            target.copy_(values[max(start - first, 0) : stop - first])


@dataclass(frozen=True)
class ShardedSeededInit(SeededInit):
    """Draw each block of the same weights on one of the ranks that have it, and gather them on the
    first of these.

    These are the ranks of a DP group, or of an expert-data group. Only the first one has all
    values; broadcast them before use. All ranks of the group must make the same shards in the same
    order. Of 5 blocks, 2 ranks draw 3 and 2:

        rank 0    0 1 2        →    0 1 2 3 4
        rank 1          3 4
    """

    def _draw(
        self,
        rows: Tensor,
        name: str,
        start: int,
        total: int,
        init: Normal | MappedUniform,
        row: RowOf,
        group: Group,
    ) -> None:
        """Draw this rank's blocks; gather all on the group's first rank by one all-to-all."""
        ranks = group_size(group)
        rank = group_rank(group)
        stop = start + len(rows)
        first = start // BLOCK_ROWS
        last = -(-stop // BLOCK_ROWS)
        blocks = [first + -(-(last - first) * index // ranks) for index in range(ranks + 1)]
        # A shard may begin or end inside a block; only its own rows are sent.
        bounds = [min(max(block * BLOCK_ROWS, start), stop) - start for block in blocks]
        own = rows[bounds[rank] : bounds[rank + 1]]
        super()._draw(own, name, start + bounds[rank], total, init, row, group)
        if ranks == 1:
            return
        # To the first rank alone, because DeepSpeed broadcasts that rank's weights over DP in any
        # case. An all-to-all, because the ranks send different numbers of rows.
        rows_sent = [0] * ranks
        rows_received = [0] * ranks
        if rank == 0:
            rows_received[1:] = [end - begin for begin, end in pairwise(bounds[1:])]
        else:
            rows_sent[0] = len(own)
        others = rows[bounds[1] : bounds[1] + sum(rows_received)]
        gathered = torch.empty_like(others, memory_format=torch.contiguous_format)
        dist.all_to_all_single(
            gathered, own[: sum(rows_sent)].contiguous(), rows_received, rows_sent, group=group
        )
        others.copy_(gathered)


@dataclass(frozen=True)
class Zeros:
    """A source of zeros, whatever the `Init`: a checkpoint replaces them."""

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        local.zero_()


@dataclass(frozen=True)
class ParameterMaker:
    """Makes the parameters of one module; constructors pass it down, and `child` extends the name.

    The constructor initialises them too, because `zero.Init` partitions them as soon as it returns.
    """

    topology: Topology
    source: WeightSource
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    prefix: str = ""

    def child(self, name: str) -> ParameterMaker:
        """Return the maker for the submodule `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def parameter(
        self, name: str, whole: Sequence[int], layout: Layout, init: Init
    ) -> nn.Parameter:
        """Make this rank's shard of the parameter `name` whose whole shape is `whole`."""
        local = self._tensor(name, whole, layout, init, self.dtype)
        parameter = nn.Parameter(local)
        set_layout(parameter, self.prefix + name, layout, whole, self.topology.tensor)
        return parameter

    def buffer(self, name: str, whole: Sequence[int], init: ConstantInit) -> Tensor:
        """Make a part of the weights that no gradient changes: the same fp32 tensor on all ranks.

        An `ExactBuffers` registers it.
        """
        layout = Replicated()
        buffer = self._tensor(name, whole, layout, init, torch.float32)
        set_layout(buffer, self.prefix + name, layout, whole, self.topology.tensor)
        return buffer

    def _tensor(
        self, name: str, whole: Sequence[int], layout: Layout, init: Init, dtype: torch.dtype
    ) -> Tensor:
        full_name = self.prefix + name
        try:
            shape = layout.local_shape(whole, self.topology.tensor)
        except ValueError as error:
            raise ValueError(f"parameter {full_name}: {error}") from error
        with torch.no_grad():
            # Cast again, because zero.Init makes every new tensor in the model's dtype.
            local = torch.empty(shape, dtype=dtype, device=self.device).to(dtype)
            if local.device.type != "meta":
                self.source.fill(local, full_name, whole, layout, init, self.topology)
        return local


class ExactBuffers(nn.Module):
    """A module whose buffers of `ParameterMaker.buffer` keep their dtype when it is cast."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or cast the module; those buffers only move, with their layouts."""
        exact = {
            name: buffer
            for name, buffer in self._buffers.items()
            if buffer is not None and has_layout(buffer)
        }
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            moved = buffer.to(self.get_buffer(name).device)
            copy_layout(buffer, moved)
            setattr(self, name, moved)
        return self
