"""Where the rows of a parameter stand in the tensors of another trainer's checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_tp.parallel.spans import Span, Spans

Rows = Callable[[int], tuple[Spans, ...]]
"""Number of rows of our parameter → the map between them and the rows of each source tensor."""


def in_order(count: int = 1) -> Rows:
    """Return the map of tensors of equal size, one after the other."""

    def rows(total: int) -> tuple[Spans, ...]:
        size = total // count
        return tuple(Spans((Span(i * size, 0, size),), total, size) for i in range(count))

    return rows


def grouped(heads: int, groups: int, head_size: int, parts: Sequence[int] = (0, 1, 2)) -> Rows:
    """Return the map of some of Q, K and V in a matrix that has them group by group.

    Of 4 heads and 2 groups, with one row a head, our query [q0 q1 q2 q3]:

        theirs    q0 q1 k0 v0 q2 q3 k1 v1       (0, 0, 2), (2, 4, 2)

    Args:
        parts: which of Q (0), K (1) and V (2) our parameter has, in this order.
    """
    queries = heads // groups
    sizes = (queries * head_size, head_size, head_size)
    starts = (0, sizes[0], sizes[0] + head_size)
    group = sum(sizes)

    def rows(total: int) -> tuple[Spans, ...]:
        spans = []
        start = 0
        for part in parts:
            for number in range(groups):
                spans.append(Span(start, number * group + starts[part], sizes[part]))
                start += sizes[part]
        assert start == total
        return (Spans(tuple(spans), total, groups * group),)

    return rows


def swapped() -> Rows:
    """Return the map of two equal halves that the source has in the other order: up and gate."""

    def rows(total: int) -> tuple[Spans, ...]:
        half = total // 2
        return (Spans((Span(0, half, half), Span(half, 0, half)), total, total),)

    return rows


def within(inner: Rows, start: int, whole: int) -> Rows:
    """Return the map of a part of one tensor, such as K of Q, K and V.

    Args:
        inner: the map of the part alone.
        start: its first row in the tensor.
        whole: rows of the tensor.
    """

    def rows(total: int) -> tuple[Spans, ...]:
        (part,) = inner(total)
        moved = (Span(own, start + theirs, length) for own, theirs, length in part)
        return (Spans(tuple(moved), total, whole),)

    return rows


def fused(*maps: Rows) -> Rows:
    """Return the map of one tensor with equal parts one after the other, each with rows of its own
    order.
    """

    def rows(total: int) -> tuple[Spans, ...]:
        parts = (part(total // len(maps))[0] for part in maps)
        return (Spans.concatenate(parts),)

    return rows


def paired(heads: int, head_size: int, rotated: int | None = None) -> Rows:
    """Return the map of heads whose rotary features are pairs (0, 1), (2, 3), … in the source, and
    (0, d/2), (1, d/2 + 1), … here.

    Of a head of 6 features: ours 0 1 2 3 4 5 are theirs 0 2 4 1 3 5.

    Args:
        rotated: features of a head that are rotated; by default all.
    """
    turned = head_size if rotated is None else rotated

    def rows(total: int) -> tuple[Spans, ...]:
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, head_size)]
        spans = tuple(
            Span(head * head_size + own, head * head_size + theirs, 1)
            for head in range(heads)
            for own, theirs in enumerate(order)
        )
        assert heads * head_size == total
        return (Spans(spans, total, total),)

    return rows


def stacked(*maps: Rows) -> Rows:
    """Return the map of tensors of equal size, one after the other, each with rows of its own
    order.
    """

    def rows(total: int) -> tuple[Spans, ...]:
        size = total // len(maps)
        parts = []
        for number, part in enumerate(maps):
            (inner,) = part(size)
            moved = (Span(number * size + span.whole_start, *span[1:]) for span in inner)
            parts.append(Spans(tuple(moved), total, inner.local_length))
        return tuple(parts)

    return rows
