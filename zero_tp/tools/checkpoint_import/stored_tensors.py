"""Tensors in files, of which only the asked part is read.

Nothing is memory-mapped, so memory holds what was asked for and no pages of the files.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.parallel.spans import Index, Span, Spans, overlaps


class StoredTensor(Protocol):
    """A tensor that is read when it is asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, index: Index) -> Tensor:
        """Return a block. `index` has a slice with start and stop for each dimension."""
        ...


@runtime_checkable
class Fills(Protocol):
    """A stored tensor that can be read to where it is wanted, without a copy in between."""

    def fill(self, target: Tensor, index: Index) -> None: ...


def read_into(target: Tensor, tensor: StoredTensor, index: Index) -> None:
    """Read a block of a stored tensor into a tensor of the block's shape."""
    if isinstance(tensor, Fills) and target.dtype == tensor.dtype:
        tensor.fill(target, index)
    else:
        target.copy_(tensor.read(index))


def whole_index(tensor: StoredTensor) -> Index:
    """Return the index of everything."""
    return tuple(slice(0, size) for size in tensor.shape)


def read_whole(tensor: StoredTensor) -> Tensor:
    """Return all of a stored tensor."""
    return tensor.read(whole_index(tensor))


def rows_of(tensor: StoredTensor, rows: slice) -> Tensor:
    """Return some rows of a stored tensor."""
    return tensor.read((rows, *whole_index(tensor)[1:]))


ROWS = 1024
"""Rows that are compared at a time."""


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors are one, or have the same values in every row, in any dtypes."""
    if first is second:
        return True
    if first.shape != second.shape:
        return False
    blocks = [slice(row, min(row + ROWS, first.shape[0])) for row in range(0, first.shape[0], ROWS)]
    return all(
        torch.equal(rows_of(first, rows).double(), rows_of(second, rows).double())
        for rows in blocks
    )


def sizes_of(index: Index) -> tuple[int, ...]:
    """Return the shape of a block."""
    return tuple(along.stop - along.start for along in index)


class Fixed:
    """Base of what a pickle makes and may not change afterwards."""

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a state of what has none")


@dataclass(frozen=True)
class FileTensor(Fixed):
    """A tensor in a file, little-endian.

    Attributes:
        path: the file.
        start: its first byte there.
        strides: in elements.
    """

    path: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]

    @classmethod
    def contiguous(
        cls, path: Path, start: int, shape: Sequence[int], dtype: torch.dtype
    ) -> FileTensor:
        """Return the tensor whose elements follow each other."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return cls(path, start, tuple(shape), dtype, tuple(strides))

    def read(self, index: Index) -> Tensor:
        sizes = sizes_of(index)
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype)
        along = list(zip(index, self.strides, strict=True))
        first = sum(part.start * stride for part, stride in along)
        last = sum((part.stop - 1) * stride for part, stride in along)
        elements = torch.empty(last - first + 1, dtype=self.dtype)
        self._read_run(elements, first)
        return elements.as_strided(sizes, self.strides)

    def fill(self, target: Tensor, index: Index) -> None:
        sizes = sizes_of(index)
        follows = math.prod(sizes[1:]) == math.prod(self.shape[1:]) and self.is_contiguous
        if follows and target.is_contiguous() and target.numel():
            self._read_run(target.view(-1), index[0].start * self.strides[0] if index else 0)
        else:
            target.copy_(self.read(index))

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements follow each other."""
        return self.strides == type(self).contiguous(self.path, 0, self.shape, self.dtype).strides

    def _read_run(self, elements: Tensor, first: int) -> None:
        """Read elements that follow each other, from element `first` on."""
        buffer = memoryview(elements.view(torch.uint8).numpy().data)
        with self.path.open("rb") as file:
            file.seek(self.start + first * self.dtype.itemsize)
            # A file that is cut off ends early, and a large read may come in parts.
            while len(buffer) and (count := file.readinto(buffer)):
                buffer = buffer[count:]
        if len(buffer):
            raise UserError(f"{self.path}: ends within a tensor; copy the checkpoint again")


@dataclass(frozen=True)
class Piece:
    """A part of a whole tensor.

    Attributes:
        spans: the map between the whole and `tensor` along each dimension.
    """

    spans: tuple[Spans, ...]
    tensor: StoredTensor

    def touches(self, index: Index) -> bool:
        """Return whether a block of the whole may have elements of this piece."""
        return all(
            along.spans
            and along.spans[0].whole_start < part.stop
            and part.start < along.spans[-1].whole.stop
            for along, part in zip(self.spans, index, strict=True)
        )


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor in pieces, each in a file of its own.

    Gate and up of 4 rows, from two ranks of TP 2:

        whole     g0 g1 g2 g3 u0 u1 u2 u3
        rank 0    g0 g1 u0 u1               spans (0, 0, 2), (4, 2, 2)
        rank 1    g2 g3 u2 u3               spans (2, 0, 2), (6, 2, 2)
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def read(self, index: Index) -> Tensor:
        result = torch.empty(sizes_of(index), dtype=self.dtype)
        self.fill(result, index)
        return result

    def fill(self, target: Tensor, index: Index) -> None:
        block = [
            Spans((Span(part.start, 0, part.stop - part.start),), size, part.stop - part.start)
            for part, size in zip(index, self.shape, strict=True)
        ]
        for piece in self.pieces:
            if not piece.touches(index):  # the most of a stack's pieces: other layers
                continue
            for source, place in overlaps(piece.spans, block):
                read_into(target[place], piece.tensor, source)


def join(
    parts: Sequence[StoredTensor], dim: int = 0, blocks: int | Sequence[int] = 1
) -> StoredTensor:
    """Return the tensor that ranks hold in parts.

    Args:
        parts: one for each rank, in order.
        dim: the dimension along which they are parts.
        blocks: number of equal runs of `dim` that are cut each: 2 for gate and up; or their
            proportions: (4, 1, 1) for Q, K and V.
    """
    if len(parts) == 1:
        return parts[0]
    shares = [1] * blocks if isinstance(blocks, int) else list(blocks)
    length = sum(part.shape[dim] for part in parts)
    shape = list(parts[0].shape)
    shape[dim] = length
    pieces = []
    done = 0
    for part in parts:
        size = part.shape[dim]
        cut = []
        for number, share in enumerate(shares):
            before = sum(shares[:number])
            start = (before * length + share * done) // sum(shares)
            cut.append(Span(start, before * size // sum(shares), share * size // sum(shares)))
        along = [Spans.identity(whole) for whole in shape]
        along[dim] = Spans(tuple(cut), length, size)
        pieces.append(Piece(tuple(along), part))
        done += size
    return JoinedTensor(tuple(shape), parts[0].dtype, tuple(pieces))


@dataclass(frozen=True)
class SelectedTensor:
    """One entry of a tensor's first dimension, such as one layer of a stack."""

    stack: StoredTensor
    number: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    def read(self, index: Index) -> Tensor:
        return self.stack.read((slice(self.number, self.number + 1), *index))[0]

    def fill(self, target: Tensor, index: Index) -> None:
        read_into(target.unsqueeze(0), self.stack, (slice(self.number, self.number + 1), *index))


@dataclass(frozen=True)
class ReshapedTensor:
    """A range of a flat tensor, in a shape. Rows are read alone, columns with their rows."""

    flat: StoredTensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    def read(self, index: Index) -> Tensor:
        if not index:
            return self.flat.read((slice(self.start, self.start + 1),)).reshape(())
        row = math.prod(self.shape[1:])
        first = self.start + index[0].start * row
        rows = self.flat.read((slice(first, self.start + index[0].stop * row),))
        sizes = (index[0].stop - index[0].start, *self.shape[1:])
        return rows.reshape(sizes)[(slice(None), *index[1:])]


def flatten(tensor: StoredTensor) -> StoredTensor:
    """Return a contiguous tensor of a file with one dimension."""
    assert isinstance(tensor, FileTensor)
    size = (math.prod(tensor.shape),)
    return FileTensor.contiguous(tensor.path, tensor.start, size, tensor.dtype)
