"""Making parameters: the same initial weights for every TP size.

A parameter is drawn on the CPU in fp32, in blocks of rows along the dimension that is split. Every block has a
generator of its own, seeded by (run seed, parameter name, block), so a rank draws only the blocks that it holds, and
TP 1, 2 and 4 start from the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from zero_tp.parallel.layout import Layout, Sharded, set_layout
from zero_tp.topology import Topology

BLOCK_ROWS = 64


@dataclass(frozen=True)
class Normal:
    """N(0, std)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Every element is `value`."""

    value: float


def _draw_rows(name: str, seed: int, rows: tuple[int, int], width: int, total: int, std: float) -> Iterator[Tensor]:
    """Rows [rows[0], rows[1]) of the [total, width] matrix called `name`, block by block, fp32."""
    first, last = rows
    for block in range(first // BLOCK_ROWS, -(-last // BLOCK_ROWS)):
        start = block * BLOCK_ROWS
        stop = min(start + BLOCK_ROWS, total)
        digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        # torch.normal: zero.Init patches torch.empty and its like to make tensors in the run's dtype.
        drawn = torch.normal(0.0, std, (stop - start, width), generator=generator, dtype=torch.float32, device="cpu")
        yield drawn[max(first - start, 0) : min(last, stop) - start]


def _fill(local: Tensor, name: str, seed: int, init: Normal, layout: Layout, whole: Sequence[int], place: Topology) -> None:
    dim = layout.dim if isinstance(layout, Sharded) else 0
    total = whole[dim]
    ranges = layout.ranges(place.tensor_rank, place.tensor) if isinstance(layout, Sharded) else iter([(0, total, 0)])
    rows = local.movedim(dim, 0)
    width = local.numel() // max(rows.shape[0], 1)
    at = 0
    for start, stop, padding in ranges:
        for drawn in _draw_rows(name, seed, (start, stop), width, total, init.std):
            target = rows[at : at + len(drawn)]
            target.copy_(drawn.view(target.shape))
            at += len(drawn)
        rows[at : at + padding].zero_()
        at += padding


@dataclass(frozen=True)
class ParameterMaker:
    """Makes the parameters of one module: names them, shards them, fills them, gives them their layout.

    Under `zero.Init` a module's parameters are partitioned as soon as its constructor returns, so they are filled
    there; the maker travels down the constructors and `child` extends the name.
    """

    topology: Topology
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    prefix: str = ""

    def child(self, name: str) -> ParameterMaker:
        """The maker for the submodule `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def make(self, name: str, whole: Sequence[int], layout: Layout, init: Normal | Constant) -> nn.Parameter:
        """This rank's shard of the parameter `name` whose whole shape is `whole`.

        Raises:
            ValueError: a dimension that is split does not divide by the TP size.
        """
        try:
            shape = layout.local_shape(whole, self.topology.tensor)
        except ValueError as error:
            raise ValueError(f"parameter {self.prefix}{name}: {error}") from error
        with torch.no_grad():
            local = torch.empty(shape, dtype=self.dtype, device=self.device)
            if local.device.type != "meta":
                if isinstance(init, Constant):
                    local.fill_(init.value)
                else:
                    _fill(local, self.prefix + name, self.seed, init, layout, whole, self.topology)
        parameter = nn.Parameter(local)
        set_layout(parameter, layout, whole, self.topology.tensor)
        return parameter
