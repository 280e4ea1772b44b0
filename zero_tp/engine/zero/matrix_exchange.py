"""Gives each matrix one owner, sends it there from the shards of TP and ZeRO, and its update back.

Two matrices of 4 rows at TP 2 × ZeRO-1 over 2 replicas, of which each rank has one row:

    rank        0     1     2     3
    has         A0    A2    A1    A3      and the same rows of B
    owns        A     B     –     –
    receives    A0 to A3 from all ranks; rank 1 likewise B0 to B3
    sends back  to each rank its row of the orthogonalised matrix

Every rank computes the same plan, so the sizes of the messages are known without asking.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.engine.zero.matrices import Matrix, MatrixPart
from zero_tp.parallel.spans import Span
from zero_tp.parallel.topology import Topology

ROUND_ELEMENTS = 2**26
"""The most elements that an owner receives or returns in a round, unless one matrix has more."""

FragmentsOf = Mapping[str, Sequence[Span]]
"""Our parameter → by global rank, the span of the flattened TP shard that the rank has."""


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each matrix.

    The costliest comes first, and each goes to the rank with the least load so far, so no rank has
    more than one matrix above the mean (Graham 1969, longest processing time first).
    """
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    # Of equal costs in order, so that all ranks compute the same.
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + costs[index], rank))
    return owners


def rounds_of(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the numbers of the matrices of each round, in which an owner receives at most
    ROUND_ELEMENTS or one matrix.

    Each owner begins at another place of its list: neighbours lie on the same data-parallel rank,
    which would otherwise send all of a round. With 4 matrices of 40 each for 2 owners and a limit
    of 50:

        matrices    a0 a1 a2 a3 of owner 0, b0 b1 b2 b3 of owner 1
        rounds      a0 b2    a1 b3    a2 b0    a3 b1
    """
    rounds: list[list[int]] = []
    for rank in range(ranks):
        own = [index for index, owner in enumerate(owners) if owner == rank]
        start = len(own) * rank // ranks
        number = received = 0
        for index in [*own[start:], *own[:start]]:
            if received and received + sizes[index] > ROUND_ELEMENTS:
                number += 1
                received = 0
            received += sizes[index]
            while len(rounds) <= number:
                rounds.append([])
            rounds[number].append(index)
    return rounds


@dataclass(frozen=True)
class Holding:
    """What one rank has of one part of a matrix.

    Attributes:
        part: of the matrix. tensor_rank: of the rank.
        runs: elements of the rank's fragment of the parameter, in the order of its shard.
        is_source: the owner takes them from this rank, and not from an equal replica.
    """

    part: MatrixPart
    tensor_rank: int
    runs: tuple[slice, ...]
    is_source: bool

    @property
    def shard(self) -> tuple[str, int]:
        return self.part.parameter, self.tensor_rank

    @property
    def numel(self) -> int:
        return sum(run.stop - run.start for run in self.runs)


@dataclass
class Round:
    """What this rank sends and receives of the matrices of one round.

    Attributes:
        own: by owner, what this rank has of that rank's matrices.
        owned: number of each matrix that this rank owns → what each rank has of it.
    """

    own: list[list[tuple[int, Holding]]]
    owned: dict[int, list[list[Holding]]]

    def received(self, topology: Topology) -> list[int]:
        """Return the elements of this rank's matrices that it receives from each rank."""
        return [
            sum(
                holding.numel
                for holdings in self.owned.values()
                for holding in holdings[source]
                if holding.is_source
            )
            for source in range(topology.world)
        ]


class MatrixExchange:
    """Sends the matrices of one optimizer step to their owners and the results back.

    Args:
        matrices: those that one call of the optimizer updates.
        costs: of each, in any unit.
        fragments: of every parameter on every rank.
    """

    def __init__(
        self,
        matrices: Sequence[Matrix],
        costs: Sequence[float],
        fragments: FragmentsOf,
        topology: Topology,
    ):
        self.matrices = matrices
        self.owners = assign_owners(costs, topology.world)
        self._topology = topology
        self._fragments = fragments
        # Without ZeRO an owner returns the whole matrix to each replica.
        sizes = [
            matrix.numel * (topology.data if self._is_copied(matrix.parts[0], 0) else 1)
            for matrix in matrices
        ]
        self._rounds = [
            self._round(numbers) for numbers in rounds_of(sizes, self.owners, topology.world)
        ]

    def _round(self, numbers: Sequence[int]) -> Round:
        ranks = range(self._topology.world)
        own: list[list[tuple[int, Holding]]] = [[] for _ in ranks]
        owned = {}
        for number in numbers:
            owner = self.owners[number]
            own[owner] += [
                (number, holding) for holding in self._holdings(number, self._topology.rank)
            ]
            if owner == self._topology.rank:
                owned[number] = [self._holdings(number, rank) for rank in ranks]
        return Round(own, owned)

    def _is_copied(self, part: MatrixPart, tensor_rank: int) -> bool:
        """Return whether every replica has the whole shard, as without ZeRO."""
        replicas = self._fragments[part.parameter][tensor_rank :: self._topology.tensor]
        return len(replicas) > 1 and len(set(replicas)) == 1

    def _holdings(self, number: int, rank: int) -> list[Holding]:
        """Return what a rank has of each part of a matrix."""
        tensor = self._topology.tensor
        owner = self.owners[number]
        holdings = []
        for part in self.matrices[number].parts:
            shard = part.shards[rank % tensor]
            if not shard.height:
                continue  # another TP rank's head
            spans = self._fragments[part.parameter]
            # Of replicas that each have the whole shard, the owner's own is the nearest.
            is_source = (
                not self._is_copied(part, rank % tensor) or rank // tensor == owner // tensor
            )
            if part.is_replicated:
                is_source = is_source and rank % tensor == owner % tensor
            runs = tuple(
                run for elements in shard.elements() for run in _common(elements, spans[rank])
            )
            holdings.append(Holding(part, rank % tensor, runs, is_source))
        return holdings

    @torch.no_grad()
    def exchange(
        self,
        fragments: Mapping[str, Tensor],
        compute: Callable[[Matrix, Tensor], Tensor],
        use: Callable[[Matrix, str, slice, Tensor], None],
        sample: Tensor,
    ) -> None:
        """Compute a new matrix from each whole one on its owner, and use each rank's elements of
        it. Collective over all ranks: two all-to-alls a round.

        Args:
            fragments: this rank's elements of each parameter.
            compute: of a matrix and its elements [rows, columns] → a result of the same shape.
            use: takes (matrix, parameter, elements of this rank's fragment, the result's elements).
            sample: a tensor of the messages' and results' dtype, on the fragments' device.
        """
        for current in self._rounds:
            self._exchange_round(current, fragments, compute, use, sample)

    # A method of its own: a round's messages are freed before the next one's are made.
    def _exchange_round(
        self,
        current: Round,
        fragments: Mapping[str, Tensor],
        compute: Callable[[Matrix, Tensor], Tensor],
        use: Callable[[Matrix, str, slice, Tensor], None],
        sample: Tensor,
    ) -> None:
        directions = [
            [
                fragments[holding.part.parameter][run]
                for _, holding in own
                if holding.is_source
                for run in holding.runs
            ]
            for own in current.own
        ]
        results = self._compute(
            current, self._all_to_all(sample, directions, current.received(self._topology)), compute
        )
        sizes = [sum(holding.numel for _, holding in own) for own in current.own]
        for own, elements in zip(
            current.own, self._all_to_all(sample, results, sizes), strict=True
        ):
            offset = 0
            for number, holding in own:
                for run in holding.runs:
                    end = offset + run.stop - run.start
                    matrix = self.matrices[number]
                    use(matrix, holding.part.parameter, run, elements[offset:end])
                    offset = end

    def _compute(
        self,
        current: Round,
        received: Sequence[Tensor],
        compute: Callable[[Matrix, Tensor], Tensor],
    ) -> list[list[Tensor]]:
        """Compute the results of this rank's matrices; return what each rank has of them."""
        offsets = [0] * self._topology.world
        returned: list[list[Tensor]] = [[] for _ in offsets]
        for number, by_rank in current.owned.items():
            matrix = self.matrices[number]
            shards: dict[tuple[str, int], list[Tensor]] = {}
            for rank, holdings in enumerate(by_rank):
                for holding in holdings:
                    if holding.is_source:
                        begin = offsets[rank]
                        offsets[rank] = end = begin + holding.numel
                        shards.setdefault(holding.shard, []).append(received[rank][begin:end])
            flat_results = _flatten(matrix, compute(matrix, _assemble(matrix, shards)))
            starts = dict.fromkeys(flat_results, 0)
            for rank, holdings in enumerate(by_rank):
                for holding in holdings:
                    flat = flat_results[holding.shard]
                    # Replicas under ZeRO have consecutive elements of a shard; others all of it.
                    begin = starts[holding.shard] % len(flat)
                    starts[holding.shard] = begin + holding.numel
                    returned[rank].append(flat[begin : begin + holding.numel])
        return returned

    def _all_to_all(
        self, sample: Tensor, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Send pieces to each rank in the dtype of `sample`; return what each rank has sent,
        flat.
        """
        pieces = [piece for of_rank in sent for piece in of_rank]
        # Joined before the cast: one kernel for all pieces, and no cast of the whole shard.
        message = (torch.cat(pieces) if pieces else sample.new_empty(0)).to(sample.dtype)
        if self._topology.world == 1:
            return [message]
        received = sample.new_empty(sum(sizes))
        lengths = [sum(map(len, of_rank)) for of_rank in sent]
        dist.all_to_all_single(received, message, list(sizes), lengths)
        return list(received.split(list(sizes)))


def _common(elements: slice, span: Span) -> Iterator[slice]:
    """Yield the elements that a fragment has, counted in the fragment; none if it has none."""
    first = max(elements.start, span.whole.start)
    last = min(elements.stop, span.whole.stop)
    if first < last:
        yield slice(first - span.whole.start, last - span.whole.start)


def _assemble(matrix: Matrix, shards: Mapping[tuple[str, int], Sequence[Tensor]]) -> Tensor:
    """Return the matrix from the elements of each parameter's shards. → [rows, columns]"""
    sample = next(iter(shards.values()))[0]
    whole = sample.new_empty(matrix.shape)
    for part in matrix.parts:
        for tensor_rank, shard in enumerate(part.shards):
            pieces = shards.get((part.parameter, tensor_rank))
            if pieces is None:  # an equal replica was sent
                continue
            rows = torch.cat(list(pieces)).view(shard.height, shard.width)
            offset = 0
            for span in shard.rows:
                whole[span.local, shard.columns] = rows[offset : offset + span.length]
                offset += span.length
    return whole


def _flatten(matrix: Matrix, whole: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the elements of a matrix in the order of each parameter's shards."""
    return {
        (part.parameter, tensor_rank): torch.cat(
            [whole[span.local, shard.columns].reshape(-1) for span in shard.rows]
        )
        for part in matrix.parts
        for tensor_rank, shard in enumerate(part.shards)
        if shard.height
    }
