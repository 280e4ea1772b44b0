"""What Muon's update takes on each rank: messages, products and temporaries, round by round.

This follows `MatrixExchange` without its tensors: the owners and rounds are its own, and a test
compares the sizes of every rank's messages with the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from zero_tp.engine.zero.matrices import Matrix, MatrixPart, call_of
from zero_tp.engine.zero.matrix_exchange import assign_owners, rounds_of
from zero_tp.engine.zero.orthogonalize import NewtonSchulz

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MatrixGroup:
    """The group of the optimizer that Muon updates.

    Attributes:
        names: of its parameters. sizes: elements of each on one TP rank.
        matrices: that they consist of.
        tensor: TP degree.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    matrices: tuple[Matrix, ...]
    tensor: int


@dataclass(frozen=True)
class Partition:
    """How ZeRO partitions a group over its replicas.

    Attributes:
        stage: of ZeRO. data: N_d.
        length: elements of a partition of the flat group, at stages 1 and 2.
        calls: the call of the optimizer that updates each parameter, in order: at stage 3 the
            number of its sub-group.
    """

    stage: int
    data: int
    length: int
    calls: tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """The elements of one call of the optimizer, by round and rank: arrays [rounds, ranks].

    Attributes:
        sent: of directions that a rank sends to owners; received: that an owner receives. Both
            count what an owner has itself.
        returned: of results that an owner sends; delivered: that a rank receives.
        results: of an owner's matrices, in the order of every TP rank's shards.
        computing: the most elements that an owner has beside `received`: its results so far, and
            the matrix that is orthogonalised with the iteration's temporaries.
        moved: the most elements that a rank sends to or receives from others in each of the two
            messages, [rounds, 2].
        own_moved: elements that a rank sends to others in both messages.
        shapes: [rows, columns] of each matrix, with its round and owner.
    """

    sent: Counts
    received: Counts
    returned: Counts
    delivered: Counts
    results: Counts
    computing: Counts
    moved: Counts
    own_moved: Counts
    shapes: tuple[tuple[int, int, tuple[int, int]], ...]


@dataclass(frozen=True)
class MatrixUpdate:
    """Muon's update of one step.

    Attributes:
        numel: elements of the matrices on one TP rank, before ZeRO partitions them.
        exchanges: one for each call of the optimizer.
        iteration: of Newton-Schulz, in the dtype of the messages.
    """

    numel: int
    exchanges: tuple[Exchange, ...]
    iteration: NewtonSchulz

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of messages and products."""
        return self.iteration.dtype.itemsize

    @property
    def rounds(self) -> int:
        return sum(len(exchange.sent) for exchange in self.exchanges)

    @cached_property
    def flops(self) -> Counts:
        """Return the floating-point operations of each rank's matrices. [ranks]"""
        flops = np.zeros_like(self.exchanges[0].own_moved[0])
        for exchange in self.exchanges:
            for _, owner, shape in exchange.shapes:
                flops[owner] += self.iteration.flops(*shape)
        return flops

    @property
    def matrices(self) -> int:
        return sum(len(exchange.shapes) for exchange in self.exchanges)

    @cached_property
    def owned(self) -> Counts:
        """Return the number and the elements of each rank's matrices. [2, ranks]"""
        owned = np.zeros((2, len(self.flops)), np.int64)
        for exchange in self.exchanges:
            for _, owner, (rows, columns) in exchange.shapes:
                owned[:, owner] += 1, rows * columns
        return owned

    @cached_property
    def sent_bytes(self) -> Counts:
        """Return the bytes that each rank sends to others in a step. [ranks]"""
        moved = [exchange.own_moved.sum(axis=0) for exchange in self.exchanges]
        return self.itemsize * np.sum(moved, axis=0)

    @cached_property
    def temporaries(self) -> Counts:
        """Return the most bytes of temporaries of each rank. [ranks]"""
        return np.max(
            [self._temporaries(exchange).max(axis=0) for exchange in self.exchanges], axis=0
        )

    def as_json(self) -> dict[str, int]:
        """Return the sizes, of the rank with the most of each, with units in the names."""
        return {
            "matrices": self.matrices,
            "owned_matrices": int(self.owned[0].max()),
            "flops_of_rank": int(self.flops.max()),
            "sent_bytes": int(self.sent_bytes.max()),
            "rounds": self.rounds,
            "temporary_bytes": int(self.temporaries.max()),
        }

    def _temporaries(self, exchange: Exchange) -> Counts:
        # Of a round, in elements of the messages' dtype; the directions are fp32:
        #
        #     joined      sent as fp32, and cast
        #     sent        sent + received
        #     computed    received + results so far + Newton-Schulz's
        #     returned    results + returned + delivered
        itemsize = self.itemsize
        alone = exchange.sent.shape[1] == 1  # nothing is sent: a rank's message is what it receives
        joined = exchange.sent * (4 + itemsize if itemsize < 4 else 4)
        received, delivered = (0, 0) if alone else (exchange.received, exchange.delivered)
        moments = (
            exchange.sent + received,
            exchange.received + exchange.computing,
            exchange.results + exchange.returned + delivered,
        )
        most: Counts = np.maximum(joined, itemsize * np.max(moments, axis=0))
        return most


@lru_cache(maxsize=256)
def matrix_update(
    group: MatrixGroup, partition: Partition, iteration: NewtonSchulz
) -> MatrixUpdate:
    """Return Muon's update of a group's matrices."""
    calls = dict(zip(group.names, partition.calls, strict=True))
    by_call: dict[int, list[Matrix]] = {}
    for matrix in group.matrices:
        by_call.setdefault(call_of(matrix, calls), []).append(matrix)
    holders = _Holders(group, partition)
    exchanges = tuple(
        _exchange(matrices, group.tensor, partition, holders, iteration)
        for matrices in by_call.values()
    )
    return MatrixUpdate(sum(group.sizes), exchanges, iteration)


class _Holders:
    """Finds the replicas that have the elements of a parameter's shard."""

    def __init__(self, group: MatrixGroup, partition: Partition):
        self._partition = partition
        self._sizes = dict(zip(group.names, group.sizes, strict=True))
        starts = np.cumsum([0, *group.sizes[:-1]]).tolist()
        self._starts = dict(zip(group.names, starts, strict=True))

    def replicas(self, parameter: str, elements: slice) -> Iterator[tuple[int, int]]:
        """Yield (data rank, number of these elements that it has), at stages 1 to 3."""
        partition = self._partition
        # Stage 3 partitions each parameter by itself, stages 1 and 2 the flat group.
        if partition.stage == 3:
            length, start = -(-self._sizes[parameter] // partition.data), 0
        else:
            length, start = partition.length, self._starts[parameter]
        first, last = start + elements.start, start + elements.stop
        for replica in range(first // length, -(-last // length)):
            begin, end = replica * length, (replica + 1) * length
            yield replica, min(last, end) - max(first, begin)


def _exchange(
    matrices: Sequence[Matrix],
    tensor: int,
    partition: Partition,
    holders: _Holders,
    iteration: NewtonSchulz,
) -> Exchange:
    ranks = partition.data * tensor
    is_copied = partition.stage == 0 and partition.data > 1
    owners = assign_owners([iteration.flops(*matrix.shape) for matrix in matrices], ranks)
    sizes = [matrix.numel * (partition.data if is_copied else 1) for matrix in matrices]
    rounds = rounds_of(sizes, owners, ranks)
    # Elements that each rank has of each owner's matrices.
    sent, received, returned, delivered, results, computing, own = np.zeros(
        (7, len(rounds), ranks), np.int64
    )
    moved = np.zeros((len(rounds), 2), np.int64)
    shapes = []
    for number, members in enumerate(rounds):
        # Elements that a rank receives from others as an owner, and back from other owners.
        from_others, back = np.zeros((2, ranks), np.int64)
        sent_away, returned_away = np.zeros((2, ranks), np.int64)
        for index in members:
            matrix, owner = matrices[index], owners[index]
            sources, targets = np.zeros((2, ranks), np.int64)
            for part in matrix.parts:
                _count(part, owner, tensor, partition, holders, sources, targets)
            sent[number] += sources
            delivered[number] += targets
            received[number, owner] += sources.sum()
            returned[number, owner] += targets.sum()
            short = min(matrix.shape)
            # The matrix, X and its next value; the Gram matrix and the polynomial.
            most = results[number, owner] + 3 * matrix.numel + 2 * short * short
            computing[number, owner] = max(computing[number, owner], most)
            results[number, owner] += sum(
                shard.height * shard.width for part in matrix.parts for shard in part.shards
            )
            shapes.append((number, owner, matrix.shape))
            from_others[owner] += sources.sum() - sources[owner]
            returned_away[owner] += targets.sum() - targets[owner]
            sources[owner] = targets[owner] = 0
            sent_away += sources
            back += targets
        own[number] = sent_away + returned_away
        moved[number] = (
            max(sent_away.max(), from_others.max()),
            max(returned_away.max(), back.max()),
        )
    return Exchange(
        sent, received, returned, delivered, results, computing, moved, own, tuple(shapes)
    )


def _count(
    part: MatrixPart,
    owner: int,
    tensor: int,
    partition: Partition,
    holders: _Holders,
    sources: Counts,
    targets: Counts,
) -> None:
    """Add the elements of a part that each rank sends to the owner and receives from it."""
    for tensor_rank, shard in enumerate(part.shards):
        # Of equal replicas over TP the owner's own is sent.
        is_source = not part.is_replicated or tensor_rank == owner % tensor
        if partition.stage == 0:
            numel = shard.height * shard.width
            targets[tensor_rank::tensor] += numel
            sources[owner - owner % tensor + tensor_rank] += numel * is_source
            continue
        for elements in shard.elements():
            for replica, numel in holders.replicas(part.parameter, elements):
                targets[replica * tensor + tensor_rank] += numel
                sources[replica * tensor + tensor_rank] += numel * is_source
