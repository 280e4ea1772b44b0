"""Estimate how long a device takes for one matrix product, one pass over memory, one collective.

Each is work over a reached rate. The rates are the device's peaks times the shares of them that others have measured
(zero_tp/devices.py); what a piece of work loses beside that follows from its shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_tp.devices import Device

TILE = (256, 128)
"""Rows and columns of the result that one multiprocessor makes at once: cuBLAS's most efficient tile (NVIDIA, Matrix
Multiplication Background User's Guide, section 2.3)."""
FLASH_SHARE = 0.6
"""Of the matrix peak in fused attention: 50 to 73 % on an A100 (FlashAttention-2, arXiv 2307.08691, abstract)."""
START, NEAR_HOP, FAR_HOP = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring before its first byte, for each hop over NVLink, and for each over a network (NCCL 2.18,
src/graph/tuning.cc: `baseLat` and `hwLat` of Ring/Simple)."""


@dataclass(frozen=True)
class Rates:
    """The rates of one device in one dtype.

    Attributes:
        element: bytes of an element.
        peak: FLOP/s of the matrix units. rate: of them what the best products reach. memory: reached bytes/s.
    """

    device: Device
    element: int
    peak: float

    @property
    def rate(self) -> float:
        return self.peak * self.device.matrix_share

    @property
    def memory(self) -> float:
        return self.device.memory_gbps * 1e9 * self.device.memory_share

    def product(self, rows: float, columns: float, depth: float) -> float:
        """Return the seconds of [rows, depth] × [depth, columns].

        The result's tiles go to the multiprocessors in waves, of which the last takes as long as a full one; writing
        the result comes on top, since a multiprocessor holds one tile at a time and multiplies no other meanwhile.
        """
        units = self.device.units
        most = math.inf
        for high, wide in (TILE, TILE[::-1]) if units > 1 else ((1, 1),):
            tiles = math.ceil(rows / high) * math.ceil(columns / wide)
            most = min(most, math.ceil(tiles / units) * units * 2.0 * high * wide * depth)
        return most / self.rate + self.element * rows * columns / self.memory

    def collective(self, size: float, ranks: int, stride: int = 1, pieces: float = 1) -> float:
        """Return the seconds of a ring all-gather or reduce-scatter.

        A ring over nodes enters and leaves each of them once, however many of its ranks are there, and has as many of
        the node's links as fall to one ring: neighbours at a stride are as many rings side by side.

        Args:
            size: bytes of the whole tensor.
            stride: between neighbours of the group, in ranks; a node has consecutive ranks.
            pieces: collectives, one after another, in which it goes.
        """
        if ranks == 1:
            return 0.0
        device = self.device
        rings = min(stride, device.per_node)
        together = max(1, device.per_node // stride)  # ranks of the group in one node
        nodes = -(-ranks // together)
        speed = device.intra_gbps * device.link_share
        if nodes > 1:
            speed = min(speed, device.inter_gbps * device.inter_share * device.per_node / rings)
        far = nodes - 1
        latency = START + far * FAR_HOP + (ranks - 1 - far) * NEAR_HOP
        return pieces * latency + size * (ranks - 1) / ranks / (speed * 1e9)

    def beside(self, seconds: float) -> float:
        """Return what products lose while a collective runs beside them for so long: its channels' multiprocessors."""
        return seconds * self.device.channels / self.device.units
