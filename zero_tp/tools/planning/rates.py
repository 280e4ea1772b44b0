"""Seconds of matrix products and of collectives on one kind of device.

Time is work divided by the achieved rate: the device's peak times a measured efficiency
(zero_tp/parallel/device_table.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_tp.base.errors import UserError
from zero_tp.parallel.devices import Device

TILE = (256, 128)
"""Rows and columns of the result that one multiprocessor makes at once: cuBLAS's most efficient
tile (NVIDIA, Matrix Multiplication Background User's Guide, section 2.3).
"""
BASE_LATENCY = 8.4e-6
NEAR_HOP = 3.4e-6
FAR_HOP = 14e-6
"""Seconds before a ring sends its first byte, of a hop over NVLink, and of a hop over a network
(NCCL 2.18, src/graph/tuning.cc: `baseLat` and `hwLat` of Ring/Simple).
"""


def matrix_flops(device: Device, dtype: str) -> float:
    """Return the peak of a device's matrix units in a run's dtype [FLOP/s].

    Raises:
        UserError: the device can't compute in this dtype.
    """
    teraflops = device.tflops(dtype)
    if teraflops is None:
        others = [name for name in ("bf16", "fp16", "fp32") if device.tflops(name)]
        raise UserError(
            f"--device: {device.name} has no {dtype} matrix units; plan for {' or '.join(others)} "
            f"(--set {dtype}.enabled=false), or another device"
        )
    return teraflops * 1e12


@dataclass(frozen=True)
class Rates:
    """The rates of one device in one dtype.

    Attributes:
        itemsize: bytes of an element.
        peak: of the matrix units [FLOP/s].
    """

    device: Device
    itemsize: int
    peak: float

    @property
    def matrix(self) -> float:
        """Return the FLOP/s that the best products reach."""
        return self.peak * self.device.matrix_share

    @property
    def memory(self) -> float:
        """Return the bytes/s that passes over memory reach."""
        return self.device.memory_gbps * 1e9 * self.device.memory_share

    def product_seconds(self, rows: float, columns: float, depth: float) -> float:
        """Return the seconds of [rows, depth] × [depth, columns].

        The multiprocessors compute the result's tiles in waves, and the last wave takes as long as
        a full one. Writing the result is added: a multiprocessor holds one tile and does not
        multiply while it writes.
        """
        # A result of 2,048 × 3,072 has 8 × 24 = 192 tiles of 256 × 128. An A100's 108
        # multiprocessors need two waves, so the product takes as long as one with 216 tiles.
        units = self.device.units
        flops = math.inf
        for tile_rows, tile_columns in (TILE, TILE[::-1]) if units > 1 else ((1, 1),):
            tiles = math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
            # cuBLAS has both orientations of the tile; a narrow result fits one better.
            flops = min(
                flops, math.ceil(tiles / units) * units * 2.0 * tile_rows * tile_columns * depth
            )
        return flops / self.matrix + self.itemsize * rows * columns / self.memory

    def collective_seconds(
        self, size: float, ranks: int, stride: int = 1, calls: float = 1
    ) -> float:
        """Return the seconds of a ring all-gather or reduce-scatter.

        A ring over several nodes enters and leaves each node once, however many of its ranks are
        there. A stride of n means n groups of the same kind, such as the DP groups under TP n.
        Their rings run at the same time and share the node's links.

        Args:
            size: bytes of the whole tensor.
            stride: distance of neighbours in the group, in ranks; a node has consecutive ranks.
            calls: the tensor is split into so many collectives, one after another.
        """
        if ranks == 1:
            return 0.0
        device = self.device
        # Two nodes of 8, TP 8, DP 2: eight DP groups (stride 8), each a ring of one rank a node.
        # They share the node's 8 ports, so each ring has one. A ring of all 16 ranks would have all
        # 8.
        rings = min(stride, device.per_node)
        ranks_of_node = max(1, device.per_node // stride)
        nodes = -(-ranks // ranks_of_node)
        speed = device.intra_gbps * device.link_share
        if nodes > 1:
            speed = min(speed, device.inter_gbps * device.inter_share * device.per_node / rings)
        # A ring of n ranks passes n - 1 hops; one between each two nodes is a far one.
        far_hops = nodes - 1
        latency = BASE_LATENCY + far_hops * FAR_HOP + (ranks - 1 - far_hops) * NEAR_HOP
        return calls * latency + size * (ranks - 1) / ranks / (speed * 1e9)

    def all_to_all_seconds(self, size: float, ranks: int, stride: int = 1) -> float:
        """Return the seconds of an all-to-all.

        Each rank sends to all others at once, inside the node and out of it at the same time.

        Args:
            size: the most bytes that one rank sends to others or receives from them.
            stride: distance of neighbours in the group, as of `collective_seconds`. Groups of the
                same kind run at the same time, but no two of them share a rank's links.
        """
        if ranks == 1:
            return 0.0
        device = self.device
        near = min(max(1, device.per_node // stride), ranks) - 1
        far_share = 1 - near / (ranks - 1)
        inside = size * (1 - far_share) / (device.intra_gbps * device.link_share * 1e9)
        outside = size * far_share / (device.inter_gbps * device.inter_share * 1e9)
        hop = FAR_HOP if far_share else NEAR_HOP
        return BASE_LATENCY + hop + max(inside, outside)

    def slowdown(self, seconds: float) -> float:
        """Return the seconds that products lose to a concurrent collective of so many seconds.

        The collective occupies multiprocessors too.
        """
        return seconds * self.device.channels / self.device.units
