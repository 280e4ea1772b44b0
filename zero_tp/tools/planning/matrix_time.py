"""The time of Muon's update of matrices, beside that of the elements that AdamW updates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zero_tp.tools.planning.matrix_update import MatrixUpdate
from zero_tp.tools.planning.plan_settings import ZeroSettings
from zero_tp.tools.planning.rates import Rates


@dataclass(frozen=True)
class MatrixTime:
    """The traffic, products, messages and launches of the updates of all groups of matrices.

    Attributes:
        updates: one for each group; empty without Muon.
    """

    updates: tuple[MatrixUpdate, ...]
    rates: Rates
    zero: ZeroSettings

    def elements(self) -> float:
        """Return the elements of this rank's shards of matrices."""
        return sum(update.numel for update in self.updates) / self._ranks_of_shards

    @property
    def _ranks_of_shards(self) -> int:
        return self.zero.data if self.zero.stage else 1

    def traffic(self) -> float:
        """Return the bytes that the update moves on this rank, without its products."""
        traffic = 0.0
        for update in self.updates:
            size = update.itemsize
            # Momentum, the direction, decay and the result's sum, in fp32; the message is joined
            # and cast.
            shards = 12 + 12 + 8 + 8 + size + 8 + (4 + size if size < 4 else 0)
            # An owner joins a shard's rows and copies them into the matrix, takes the norm and
            # divides; the result is split and joined.
            owned = (4 + 3 + 4) * size * float(update.owned[1].max())
            traffic += shards * update.numel / self._ranks_of_shards + owned
        return traffic

    def newton_schulz(self) -> float:
        """Return the seconds of products: in each round all ranks wait for the slowest owner."""
        return sum(map(self._newton_schulz, self.updates))

    def _newton_schulz(self, update: MatrixUpdate) -> float:
        seconds = dict[tuple[int, int], float]()
        total = 0.0
        for exchange in update.exchanges:
            by_owner = np.zeros(exchange.sent.shape)
            for number, owner, shape in exchange.shapes:
                if shape not in seconds:
                    short, long = sorted(shape)
                    product = self.rates.product_seconds
                    seconds[shape] = update.iteration.steps * (
                        product(short, short, long)
                        + product(short, short, short)
                        + product(short, long, short)
                    )
                by_owner[number, owner] += seconds[shape]
            total += float(by_owner.max(axis=1).sum())
        return total

    def exchange(self) -> float:
        """Return the seconds of two all-to-alls a round, over all ranks."""
        return sum(
            self.rates.all_to_all_seconds(update.itemsize * float(moved), len(update.flops))
            for update in self.updates
            for exchange in update.exchanges
            for moved in exchange.moved.flat
        )

    def launches(self) -> float:
        """Return the number of kernels that an accelerator starts for the update."""
        ranks = self.zero.data if self.zero.stage in (1, 2) else 1
        launches = 0.0
        for update in self.updates:
            # Three products an iteration, and eight others a matrix; a sum into each rank's part.
            launches += float(update.owned[0].max()) * (3 * update.iteration.steps + 8)
            launches += update.matrices / ranks
        return launches
