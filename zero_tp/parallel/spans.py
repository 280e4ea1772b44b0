"""One interval map for all that splits a parameter: TP, Hugging Face's files, ZeRO, checkpoints.

A map relates a whole to one part of it along one dimension. A fused QKV of 4 + 2 + 2 heads, TP 2:

    whole     q0 q1 q2 q3 k0 k1 v0 v1     spans of rank 1: (whole start, local start, length)
    rank 0    q0 q1 k0 v0
    rank 1    q2 q3 k1 v1                 (2, 0, 2), (5, 2, 1), (7, 3, 1)

Two maps of one whole compose (`onto`). Rank 1's shard onto a file that has only K, [k0 k1], is
(2, 1, 1): the shard's element 2 is the file's element 1.

| part                       | its map has                                                    |
| -------------------------- | -------------------------------------------------------------- |
| a replica                  | one span, of everything                                        |
| a TP shard of fused pieces | a span for each piece                                          |
| a vocabulary's last shards | local elements without a span: padding                         |
| a tensor of Hugging Face   | its rows of our parameter, in any order                        |
| a fragment under ZeRO      | one span, of the flattened TP shard                            |
| nothing on this rank       | no span                                                        |

A tensor has one map for each dimension, so it may be split along several (experts and their rows).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

Index = tuple[slice, ...]
"""A block of a tensor: one slice for each dimension."""


class Span(NamedTuple):
    """A run of `length` elements of a whole, and where it starts in the whole and in a part."""

    whole_start: int
    local_start: int
    length: int

    @classmethod
    def block(cls, index: int, length: int, whole_length: int, local_start: int = 0) -> Span:
        """Return block `index` of a whole in blocks of `length`; the last may be short or empty.

        Of 7 elements in blocks of 3: block 1 is [3, 6), block 2 is [6, 7), block 3 is empty.
        """
        start = min(index * length, whole_length)
        stop = min(start + length, whole_length)
        return cls(start, local_start, stop - start)

    @property
    def whole(self) -> slice:
        return slice(self.whole_start, self.whole_start + self.length)

    @property
    def local(self) -> slice:
        return slice(self.local_start, self.local_start + self.length)

    def narrow(self, elements: slice) -> Span:
        """Return some of these elements, counted from the first."""
        start = elements.start
        return Span(self.whole_start + start, self.local_start + start, elements.stop - start)


@dataclass(frozen=True)
class Spans:
    """The map between a whole and a part of it, along one dimension.

    Maps of the same elements are equal: empty spans are dropped, spans that continue each
    other are joined, and all are in the whole's order.

    Attributes:
        spans: disjoint in the whole and in the part.
        whole_length, local_length: of the dimension in the whole, and in the part with its padding.
    """

    spans: tuple[Span, ...]
    whole_length: int
    local_length: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", _joined(self.spans))

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    @classmethod
    def identity(cls, length: int) -> Spans:
        """Return the map of a replica, which has everything in its place."""
        return cls((Span(0, 0, length),), length, length)

    @classmethod
    def concatenate(cls, maps: Iterable[Spans]) -> Spans:
        """Return the map between the concatenated wholes and the concatenated parts."""
        spans = list[Span]()
        whole = local = 0
        for part in maps:
            spans += [Span(whole + start, local + own, length) for start, own, length in part]
            whole += part.whole_length
            local += part.local_length
        return cls(tuple(spans), whole, local)

    def inverse(self) -> Spans:
        """Return the map with the whole and the part exchanged."""
        spans = tuple(Span(local, whole, length) for whole, local, length in self)
        return Spans(spans, self.local_length, self.whole_length)

    def onto(self, other: Spans) -> Spans:
        """Return the map from this part (as the whole) to another part, of what both have.

        A vocabulary of 8 rows at TP 2, onto the shards of the same vocabulary at TP 4:

            whole               0 1 2 3 4 5 6 7
            rank 1 of 2                 4 5 6 7        (4, 0, 4)
            rank 3 of 4                     6 7        (6, 0, 2)
            the first onto the second                  (2, 0, 2): its elements 2 and 3
        """
        spans = []
        for own, theirs in itertools.product(self, other):
            start = max(own.whole_start, theirs.whole_start)
            own_stop = own.whole_start + own.length
            length = min(own_stop, theirs.whole_start + theirs.length) - start
            if length > 0:
                # Both parts count from their own first element, so the common run is moved into
                # each one's count.
                source = own.local_start + start - own.whole_start
                target = theirs.local_start + start - theirs.whole_start
                spans.append(Span(source, target, length))
        return Spans(tuple(spans), self.local_length, other.local_length)

    def narrow(self, elements: slice) -> Spans:
        """Return the map to some of the part's elements, counted from the first of them.

        Of rank 1's q2 q3 k1 v1 (the module's example), elements [1, 3) are q3 k1: (3, 0, 1),
        (5, 1, 1).
        """
        length = elements.stop - elements.start
        window = Spans((Span(elements.start, 0, length),), self.local_length, length)
        return self.inverse().onto(window)

    def padding(self) -> Iterator[slice]:
        """Yield the runs of the part's elements that the whole does not have.

        A vocabulary of 5 at TP 2 takes 3 rows a rank: rank 1 has tokens 3 and 4; its row 2 is
        padding.
        """
        position = 0
        for span in self.inverse():
            if position < span.whole_start:
                yield slice(position, span.whole_start)
            position = span.whole.stop
        if position < self.local_length:
            yield slice(position, self.local_length)


def _joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sort by the whole, drop empty spans, and join those that continue each other."""
    joined = list[Span]()
    for span in sorted(span for span in spans if span.length):
        last = joined[-1] if joined else None
        if last and span[:2] == (last.whole.stop, last.local.stop):
            joined[-1] = last._replace(length=last.length + span.length)
        else:
            joined.append(span)
    return tuple(joined)


def blocks(spans: Sequence[Spans]) -> Iterator[tuple[Index, Index]]:
    """Yield (index in the whole, index in the part) of each block of a tensor that a part has.

    Args:
        spans: the part's map along each dimension.
    """
    for block in itertools.product(*spans):
        yield tuple(span.whole for span in block), tuple(span.local for span in block)


def overlaps(source: Sequence[Spans], target: Sequence[Spans]) -> Iterator[tuple[Index, Index]]:
    """Yield (index in the source, index in the target) of each block that two parts share.

    Args:
        source, target: the parts' maps along each dimension.
    """
    return blocks([own.onto(theirs) for own, theirs in zip(source, target, strict=True)])


def zero_padding(local: Tensor, spans: Sequence[Spans]) -> None:
    """Zero what a part has and the whole has not.

    Args:
        spans: the part's map along each dimension.
    """
    for dim, along in enumerate(spans):
        for padding in along.padding():
            local.narrow(dim, padding.start, padding.stop - padding.start).zero_()


def enclosing_block(shape: Sequence[int], start: int, stop: int) -> tuple[Index, int]:
    """Return the smallest block with elements [start, stop) of a flattened tensor.

    Of a tensor of shape [4, 6]:

        elements [7, 11)     . a b c d .              block [1:2, 1:5], from its element 0 on

        elements [7, 14)     . a b c d e              block [1:3, 0:6], from its element 1 on
                             f g . . . .

    Returns:
        (index of the block, position of element `start` in the flattened block).
    """
    index = list[slice]()
    numel = math.prod(shape)
    for dim, length in enumerate(shape):
        # Elements of one index of this dimension, its stride in a contiguous tensor.
        numel //= length
        first = start // numel
        last = (stop - 1) // numel
        index.append(slice(first, last + 1))
        start -= first * numel
        stop -= first * numel
        if first < last:  # the elements continue in the next row: all of the later dimensions
            index += [slice(0, length) for length in shape[dim + 1 :]]
            break
    return tuple(index), start
