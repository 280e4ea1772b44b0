"""Read masters and moments from a checkpoint in the shards of any topology.

The manifest has the layout of each parameter. One parameter is in memory at a time. Hashes are not compared here:
verify a checkpoint before you read it (`check_content`, `verify_checkpoint`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.strict_json import parse_json
from zero_tp.engine.zero.states import MASTER
from zero_tp.parallel.layout import Layout, Replicated, Sharded, layout_of, whole_shape
from zero_tp.parallel.parameter import Init
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.directory import MANIFEST, Damaged
from zero_tp.run.checkpoint.manifest import Manifest, ReplicatedParameter, ShardedParameter, states_file

STARTS = "starts"  # key of a file's metadata: parameter → where the fragment starts in the flattened TP shard
RANDOM = "random"  # prefix of the random streams' names


def tensor_name(parameter: str, kind: str) -> str:
    return f"{parameter}/{kind}"


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter's layout and whole shape."""

    layout: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> ParameterLayout:
        return cls(layout_of(parameter), whole_shape(parameter))

    @classmethod
    def from_manifest(cls, entry: ShardedParameter | ReplicatedParameter) -> ParameterLayout:
        shape = tuple(entry.shape)
        if isinstance(entry, ShardedParameter):
            return cls(Sharded(entry.dim, tuple(entry.parts), entry.padded), shape)
        return cls(Replicated(entry.gradient), shape)

    def to_json(self) -> dict[str, Any]:
        return {"layout": type(self.layout).__name__, **vars(self.layout), "shape": list(self.shape)}

    def same_split(self, other: ParameterLayout) -> bool:
        """Return whether both give each TP rank the same elements at any TP size."""
        both_replicated = isinstance(self.layout, Replicated) and isinstance(other.layout, Replicated)
        return both_replicated or self.layout == other.layout


class StatesFile:
    """One rank's file of a checkpoint, mapped into memory."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            self.starts: dict[str, int] = parse_json(self._file.metadata()[STARTS])
        except Exception as error:  # damage can raise anything
            raise Damaged(path, f"cannot be read ({first_line(error)})") from error

    def elements(self, parameter: str, kind: str, start: int, stop: int) -> Tensor:
        """Return the TP shard's elements [start, stop) up to the fragment's end; empty if it lacks the first."""
        first = self.starts.get(parameter)
        if first is None or start < first:
            return torch.empty(0)
        try:
            tensor: Tensor = self._file.get_tensor(tensor_name(parameter, kind))
        except SafetensorError as error:
            raise Damaged(self.path, f"holds no {tensor_name(parameter, kind)}") from error
        return tensor[start - first : stop - first]


class CheckpointReader:
    """Reads the tensors of one checkpoint. As a `WeightSource` it gives a new model the fp32 masters.

    Attributes:
        parameters: the saved layouts by name.
        tensor, data: the TP and DP sizes that saved it.

    Raises:
        Damaged: from every method that reads: a file is missing, cannot be read or lacks elements.
    """

    def __init__(self, directory: Path, manifest: Manifest, data_rank: int = 0):
        """Prepare to read; files are opened on first use.

        Args:
            data_rank: the DP rank whose file is read first; others are opened only for elements that it lacks.
        """
        self.directory = directory
        self.tensor, self.data = manifest.tensor, manifest.data
        self.parameters = {name: ParameterLayout.from_manifest(entry) for name, entry in manifest.parameters.items()}
        self._preferred_rank = min(data_rank, self.data - 1)
        self._files: dict[tuple[int, int], StatesFile] = {}
        self._fragments: dict[int, dict[str, list[tuple[int, StatesFile]]]] = {}

    def _file(self, tensor_rank: int, data_rank: int) -> StatesFile:
        ranks = tensor_rank, data_rank
        if ranks not in self._files:
            self._files[ranks] = StatesFile(self.directory / states_file(*ranks))
        return self._files[ranks]

    def _fragments_of(self, name: str, tensor_rank: int) -> list[tuple[int, StatesFile]]:
        """Return (first element, file) of each fragment of a TP rank's shard, in order. Opens all of its files."""
        if tensor_rank not in self._fragments:
            by_parameter: dict[str, list[tuple[int, StatesFile]]] = {}
            for file in (self._file(tensor_rank, data_rank) for data_rank in range(self.data)):
                for parameter, first in file.starts.items():
                    by_parameter.setdefault(parameter, []).append((first, file))
            for fragments in by_parameter.values():
                fragments.sort(key=itemgetter(0))
            self._fragments[tensor_rank] = by_parameter
        return self._fragments[tensor_rank].get(name, [])

    def fill(
        self, local: Tensor, name: str, whole: Sequence[int], layout: Layout, init: Init, topology: Topology
    ) -> None:
        """Write this rank's shard of a parameter's master into `local`."""
        wanted, saved = ParameterLayout(layout, tuple(whole)), self.parameters.get(name)
        if saved is None or saved.shape != wanted.shape:
            problem = "no such parameter" if saved is None else f"shape {saved.shape}, expected {wanted.shape}"
            raise UserError(f"{self.directory}: {name}: {problem}")
        piece = self.piece(name, MASTER, wanted, topology.tensor_rank, topology.tensor)
        local.copy_(piece.view(local.shape))

    def piece(
        self,
        name: str,
        kind: str,
        wanted: ParameterLayout,
        rank: int,
        size: int,
        start: int = 0,
        numel: int | None = None,
    ) -> Tensor:
        """Return elements [start, start + numel) of the flattened shard of TP rank `rank` of `size`, fp32 [numel].

        Args:
            wanted: the parameter's layout at that TP size, with the same whole shape.
            numel: by default, all from `start` on.
        """
        if numel is None:
            numel = math.prod(wanted.layout.local_shape(wanted.shape, size)) - start
        saved = self.parameters[name]
        if saved.same_split(wanted) and (size == self.tensor or isinstance(saved.layout, Replicated)):
            return self._elements(name, kind, rank if size == self.tensor else 0, start, numel)
        # View shards as [outer, rows, inner]: layouts split the rows. Read only the indices that the piece needs.
        dim = saved.layout.dim if isinstance(saved.layout, Sharded) else wanted.layout.dim
        shape = wanted.layout.local_shape(wanted.shape, size)
        rows, inner = shape[dim], math.prod(shape[dim + 1 :])
        outer = range(start // (rows * inner), -(-(start + numel) // (rows * inner)))
        offset = outer.start * rows * inner
        low, high = (0, rows) if len(outer) > 1 else ((start - offset) // inner, -(-(start + numel - offset) // inner))
        block = torch.zeros(len(outer), high - low, inner)  # padding stays zero
        for saved_rank in range(1 if isinstance(saved.layout, Replicated) else self.tensor):
            for saved_start, saved_stop, saved_first in _row_ranges(saved, dim, saved_rank, self.tensor):
                for own_start, own_stop, own_first in _row_ranges(wanted, dim, rank, size):
                    shift = own_first - own_start - low  # from a row of the whole parameter to a row of the block
                    first = max(saved_start, own_start, -shift)
                    last = min(saved_stop, own_stop, high - low - shift)
                    if first < last:
                        source = saved_first + first - saved_start
                        values = self._rows(name, kind, saved_rank, dim, outer, source, last - first)
                        block[:, first + shift : last + shift].copy_(values)
        return block.flatten()[start - offset - low * inner :][:numel]

    def _rows(self, name: str, kind: str, saved_rank: int, dim: int, outer: range, first: int, count: int) -> Tensor:
        """Return rows [first, first + count) of a saved shard for these outer indices → [outer, count, inner]."""
        saved = self.parameters[name]
        shape = saved.layout.local_shape(saved.shape, self.tensor)
        inner = math.prod(shape[dim + 1 :])
        step, length = shape[dim] * inner, count * inner
        start = outer.start * step + first * inner
        elements = self._elements(name, kind, saved_rank, start, (len(outer) - 1) * step + length)
        return elements.as_strided((len(outer), count, inner), (step, inner, 1))

    def whole(self, name: str, kind: str = MASTER) -> Tensor:
        """Return the whole parameter's master or state, without padding, fp32."""
        shape = self.parameters[name].shape
        return self.piece(name, kind, ParameterLayout(Replicated(), shape), 0, 1).view(shape)

    def _elements(self, name: str, kind: str, tensor_rank: int, start: int, numel: int) -> Tensor:
        """Return elements of a saved shard from the files of the DP ranks that have them."""
        stop = start + numel
        pieces = [self._file(tensor_rank, self._preferred_rank).elements(name, kind, start, stop)]
        position = start + len(pieces[0])
        fragments = self._fragments_of(name, tensor_rank) if position < stop else []
        while position < stop:
            index = max(bisect_right(fragments, position, key=itemgetter(0)) - 1, 0)
            pieces.append(fragments[index][1].elements(name, kind, position, stop) if fragments else torch.empty(0))
            if not len(pieces[-1]):
                problem = f"the files lack elements [{position}, {stop}) of {name} ({kind})"
                raise Damaged(self.directory / MANIFEST, problem)
            position += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _row_ranges(parameter: ParameterLayout, dim: int, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, first): the shard's rows from `first` on are rows [start, stop) of the whole parameter."""
    if isinstance(parameter.layout, Replicated):
        yield 0, parameter.shape[dim], 0
        return
    first = 0
    for start, stop, padding in parameter.layout.ranges(rank, size):
        yield start, stop, first
        first += stop - start + padding
