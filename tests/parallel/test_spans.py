"""The interval map, compared with plain slicing and concatenation of tensors."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero_tp.parallel.layout import Replicated, Sharded
from zero_tp.parallel.spans import (
    Span,
    Spans,
    blocks,
    enclosing_block,
    overlaps,
    zero_padding,
)

PADDING = -1


class Part(NamedTuple):
    """A map, and the whole's index of each element of the part; PADDING where it has none."""

    spans: Spans
    indices: Tensor


@st.composite
def parts(draw: st.DrawFn, length: int) -> Part:
    """Cut a whole into runs; take some of them in any order, with padding between them."""
    cuts = draw(st.sets(st.integers(0, length)))
    bounds = sorted({0, length, *cuts})
    runs = draw(st.permutations(list(itertools.pairwise(bounds))))
    taken = runs[: draw(st.integers(0, len(runs)))]
    pieces = [torch.empty(0, dtype=torch.long)]
    spans = []
    for start, stop in taken:
        pieces.append(torch.full((draw(st.integers(0, 2)),), PADDING))
        spans.append(Span(start, sum(map(len, pieces)), stop - start))
        pieces.append(torch.arange(start, stop))
    pieces.append(torch.full((draw(st.integers(0, 2)),), PADDING))
    indices = torch.cat(pieces)
    shuffled = draw(st.permutations(spans))
    return Part(Spans(tuple(shuffled), length, len(indices)), indices)


def indices_of(spans: Spans) -> list[int]:
    indices = torch.full((spans.local_length,), PADDING)
    for whole_start, local_start, length in spans.spans:
        indices[local_start : local_start + length] = torch.arange(length) + whole_start
    return indices.tolist()


def positions(values: Tensor, wanted: Tensor) -> list[int]:
    """Return where each wanted value is; PADDING for those that are missing, and for padding."""
    places = {index: place for place, index in enumerate(values.tolist()) if index != PADDING}
    return [places.get(index, PADDING) for index in wanted.tolist()]


def part_of(whole: Tensor, indices: list[Tensor]) -> Tensor:
    """Return the elements with these indices along each dimension; padding is zeros."""
    for dim, along in enumerate(indices):
        zeros = torch.zeros_like(whole.narrow(dim, 0, 1))
        whole = torch.cat([whole, zeros], dim)  # index -1
        whole = whole.index_select(dim, along % whole.shape[dim])
    return whole


LENGTHS = st.integers(1, 12)


@given(st.data())
def test_a_map_has_what_its_part_has(data: st.DataObject) -> None:
    spans, indices = data.draw(LENGTHS.flatmap(parts))
    assert indices_of(spans) == indices.tolist()
    padding = [torch.arange(len(indices))[run] for run in spans.padding()]
    assert torch.equal(torch.cat([torch.empty(0), *padding]), (indices == PADDING).nonzero()[:, 0])


@given(st.data())
def test_maps_of_the_same_elements_are_equal(data: st.DataObject) -> None:
    spans, _ = data.draw(LENGTHS.flatmap(parts))
    single = [span.narrow(slice(one, one + 1)) for span in spans for one in range(span.length)]
    empty = [Span(0, 0, 0), Span(spans.whole_length, spans.local_length, 0)]
    other = Spans(tuple(data.draw(st.permutations(single + empty))), *lengths(spans))
    assert other == spans and hash(other) == hash(spans)
    assert (spans == Spans(spans.spans, spans.whole_length, spans.local_length + 1)) is False


def lengths(spans: Spans) -> tuple[int, int]:
    return spans.whole_length, spans.local_length


@given(st.data())
def test_a_part_onto_another(data: st.DataObject) -> None:
    length = data.draw(LENGTHS)
    source, target = (data.draw(parts(length), which) for which in ("source", "target"))
    composed = source.spans.onto(target.spans)
    assert indices_of(composed) == positions(source.indices, target.indices)
    assert lengths(composed) == (len(source.indices), len(target.indices))
    assert target.spans.onto(source.spans) == composed.inverse()


@given(st.data())
def test_inverse(data: st.DataObject) -> None:
    spans, indices = data.draw(LENGTHS.flatmap(parts))
    assert indices_of(spans.inverse()) == positions(indices, torch.arange(spans.whole_length))
    assert spans.inverse().inverse() == spans


@given(st.data())
def test_narrow(data: st.DataObject) -> None:
    spans, indices = data.draw(LENGTHS.flatmap(parts))
    start = data.draw(st.integers(0, len(indices)), "start")
    elements = slice(start, data.draw(st.integers(start, len(indices)), "stop"))
    assert indices_of(spans.narrow(elements)) == indices[elements].tolist()
    assert spans.narrow(elements).whole_length == spans.whole_length
    whole = torch.arange(spans.whole_length)
    for span in spans:
        inner = slice(span.length // 3, span.length)
        assert torch.equal(indices[span.local][inner], indices[span.narrow(inner).local])
        assert torch.equal(indices[span.narrow(inner).local], whole[span.narrow(inner).whole])


@given(st.data())
def test_concatenate(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(LENGTHS.flatmap(parts), max_size=3))
    expected, offset = [], 0
    for spans, indices in drawn:
        expected += [index + offset if index != PADDING else PADDING for index in indices.tolist()]
        offset += spans.whole_length
    joined = Spans.concatenate(spans for spans, _ in drawn)
    assert indices_of(joined) == expected and joined.whole_length == offset


@given(st.integers(1, 20), st.integers(1, 7), st.integers(0, 9))
def test_blocks_of_a_whole(length: int, block_length: int, index: int) -> None:
    whole = torch.arange(length)
    pieces = whole.split(block_length)
    span = Span.block(index, block_length, length, 3)
    expected = pieces[index] if index < len(pieces) else whole[:0]
    assert torch.equal(whole[span.whole], expected)
    assert span.local == slice(3, 3 + len(expected))


@given(st.data())
def test_blocks_of_tensors(data: st.DataObject) -> None:
    """Any dimension may be split, several at once: experts and their rows."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3), "shape")
    whole = torch.arange(1, 1 + math.prod(shape)).view(shape)  # no element is zero, as padding is
    source, target = ([data.draw(parts(length)) for length in shape] for _ in range(2))
    from_whole = part_of(whole, [part.indices for part in source])
    copy = torch.full_like(from_whole, 7)
    zero_padding(copy, [part.spans for part in source])
    for whole_index, index in blocks([part.spans for part in source]):
        copy[index] = whole[whole_index]
    assert torch.equal(copy, from_whole)
    expected = part_of(whole, [part.indices for part in target])
    expected[~torch.isin(expected, from_whole)] = 0
    shared = torch.zeros_like(expected)
    maps = ([part.spans for part in one] for one in (source, target))
    for source_index, index in overlaps(*maps):
        shared[index] = from_whole[source_index]
    assert torch.equal(shared, expected)


@given(st.data())
def test_the_smallest_block_with_some_elements(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4), "shape")
    whole = torch.arange(math.prod(shape)).view(shape)
    start = data.draw(st.integers(0, whole.numel() - 1), "start")
    stop = data.draw(st.integers(start + 1, whole.numel()), "stop")
    index, offset = enclosing_block(shape, start, stop)
    assert torch.equal(whole[index].flatten()[offset:][: stop - start], whole.flatten()[start:stop])
    ends = torch.unravel_index(torch.tensor([start, stop - 1]), shape)
    first, last = zip(*(along.tolist() for along in ends), strict=True)
    same = [a == b for a, b in zip(first, last, strict=True)]
    split = same.index(False) if False in same else len(shape)
    for dim, along in enumerate(index):
        expected = slice(first[dim], last[dim] + 1) if dim <= split else slice(0, shape[dim])
        assert along == expected


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [(0, 0, 2), (4, 2, 1), (6, 3, 1)]),
        (1, [(2, 0, 2), (5, 2, 1), (7, 3, 1)]),
    ],
)
def test_fused_query_key_and_value(rank: int, expected: list[tuple[int, int, int]]) -> None:
    """The example of the module: 4 + 2 + 2 heads, TP 2."""
    layout = Sharded(0, (4, 2, 2))
    (shard,) = layout.spans((8,), rank, 2)
    assert list(shard) == expected
    key = Spans((Span(4, 0, 2),), 8, 2)
    assert list(shard.onto(key)) == [(2, rank, 1)]
    assert layout.spans((8,), 0, 1) == Replicated().spans((8,), 0, 1) == (Spans.identity(8),)


def test_a_vocabulary_that_does_not_divide() -> None:
    layout = Sharded(0, (5,), padded=True)
    shards = [layout.spans((5, 3), rank, 4) for rank in range(4)]
    assert [list(rows) for rows, _ in shards] == [[(0, 0, 2)], [(2, 0, 2)], [(4, 0, 1)], []]
    assert [list(rows.padding()) for rows, _ in shards] == [[], [], [slice(1, 2)], [slice(0, 2)]]
    assert {columns for _, columns in shards} == {Spans.identity(3)}


def test_a_rank_without_the_parameter() -> None:
    """A pipeline's stage has no elements of another stage's parameters."""
    nothing = Spans((), 8, 0)
    assert not list(nothing) and not list(nothing.padding())
    assert not list(blocks([nothing, Spans.identity(3)]))
    assert not list(nothing.onto(Spans.identity(8)))
    assert list(Spans.identity(8).onto(nothing).padding()) == []
