"""Read masters and moments from a checkpoint in the shards of any topology.

The manifest has the layout of each parameter. One parameter is in memory at a time. Hashes are not
compared here: verify a checkpoint before you read it (`check_content`, `verify_checkpoint`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero_tp.base.errors import UserError, first_line
from zero_tp.base.strict_json import parse_json
from zero_tp.engine.zero.states import EMA, MASTER
from zero_tp.parallel.layout import Layout, Replicated, Sharded, layout_of, whole_shape
from zero_tp.parallel.parameter import Init
from zero_tp.parallel.spans import Index, Spans, enclosing_block, overlaps
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.directory import MANIFEST, Damaged
from zero_tp.run.checkpoint.manifest import (
    Manifest,
    ReplicatedParameter,
    ShardedParameter,
    states_file,
)

# key of a file's metadata: parameter → where the fragment starts in the flattened TP shard
STARTS = "starts"
RANDOM = "random"  # prefix of the random streams' names


def tensor_name(parameter: str, kind: str) -> str:
    return f"{parameter}/{kind}"


@dataclass(frozen=True)
class ParameterLayout:
    """A parameter's layout and whole shape."""

    layout: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: Tensor) -> ParameterLayout:
        return cls(layout_of(parameter), whole_shape(parameter))

    @classmethod
    def from_manifest(cls, entry: ShardedParameter | ReplicatedParameter) -> ParameterLayout:
        shape = tuple(entry.shape)
        if isinstance(entry, ShardedParameter):
            layout = Sharded(entry.dim, tuple(entry.parts), entry.padded, entry.experts)
            return cls(layout, shape)
        return cls(Replicated(entry.gradient), shape)

    def to_json(self) -> dict[str, Any]:
        fields = dict(vars(self.layout))
        if self.layout.experts == 1:
            fields.pop("experts", None)  # which earlier versions do not read
        return {"layout": type(self.layout).__name__, **fields, "shape": list(self.shape)}

    def spans(self, place: Place) -> tuple[Spans, ...]:
        """Return the map between the parameter and a rank's shard, along each dimension:
        `Layout.spans` of parallel/layout.py.
        """
        return _spans(self.layout, self.shape, place)


class Place(NamedTuple):
    """Which shard of a parameter: a TP rank of `tensor`, and of experts an expert rank."""

    tensor_rank: int
    tensor: int
    expert_rank: int = 0

    @classmethod
    def of(cls, topology: Topology) -> Place:
        return cls(topology.tensor_rank, topology.tensor, topology.expert_rank)


@cache  # a parameter is read once for its master and once for each moment
def _spans(layout: Layout, shape: tuple[int, ...], place: Place) -> tuple[Spans, ...]:
    return layout.spans(shape, *place)


class SavedShard(NamedTuple):
    """A saved shard of a parameter, whose fragments are in the files of one TP rank's DP ranks.

    Of experts that were divided over expert ranks, each `experts`-th of these DP ranks has a part.
    """

    tensor_rank: int
    expert_rank: int
    experts: int


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
        """Return elements of the TP shard, as far as this file has them.

        Args:
            start, stop: of the flattened shard. A fragment that ends before `stop` gives fewer
                elements, one that begins after `start` gives none.
        """
        first = self.starts.get(parameter)
        # No error: the file of another DP rank has these elements, and the caller looks there.
        if first is None or start < first:
            return torch.empty(0)
        try:
            tensor: Tensor = self._file.get_tensor(tensor_name(parameter, kind))
        except SafetensorError as error:
            raise Damaged(self.path, f"holds no {tensor_name(parameter, kind)}") from error
        # A slice beyond the fragment's end is cut there, so the caller sees how far this file
        # reaches.
        return tensor[start - first : stop - first]


class CheckpointReader:
    """Reads the tensors of one checkpoint.

    As a `WeightSource` it gives a new model the fp32 masters, or their averages.

    Attributes:
        parameters: the saved layouts by name.
        tensor, data: the TP and DP sizes that saved it.

    Raises:
        Damaged: from every method that reads: a file is missing, cannot be read or lacks elements.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        data_rank: int = 0,
        *,
        averaged: Collection[str] = (),
    ):
        """Prepare to read; files are opened on first use.

        Args:
            data_rank: the DP rank whose file is read first; others are opened only for elements
                that it lacks.
            averaged: the parameters whose weight is the saved average instead of the master.
        """
        self.directory = directory
        self._averaged = averaged
        self.tensor = manifest.tensor
        self.data = manifest.data
        self.parameters = {
            name: ParameterLayout.from_manifest(entry)
            for name, entry in manifest.parameters.items()
        }
        # With more replicas than the saved run had, the later ones begin with the last file.
        self._preferred_rank = min(data_rank, self.data - 1)
        self._files: dict[tuple[int, int], StatesFile] = {}
        self._fragments: dict[SavedShard, dict[str, list[tuple[int, StatesFile]]]] = {}

    def _file(self, tensor_rank: int, data_rank: int) -> StatesFile:
        ranks = tensor_rank, data_rank
        if ranks not in self._files:
            self._files[ranks] = StatesFile(self.directory / states_file(*ranks))
        return self._files[ranks]

    def _fragments_of(self, name: str, shard: SavedShard) -> list[tuple[int, StatesFile]]:
        """Return (first element, file) of each fragment of a saved shard, in order.

        It opens the files of all DP ranks that have a part of it, so only if the preferred file is
        not enough.
        """
        if shard not in self._fragments:
            by_parameter: dict[str, list[tuple[int, StatesFile]]] = {}
            ranks = range(shard.expert_rank, self.data, shard.experts)
            for file in (self._file(shard.tensor_rank, data_rank) for data_rank in ranks):
                for parameter, first in file.starts.items():
                    by_parameter.setdefault(parameter, []).append((first, file))
            for fragments in by_parameter.values():
                fragments.sort(key=itemgetter(0))
            self._fragments[shard] = by_parameter
        return self._fragments[shard].get(name, [])

    def _preferred_file(self, shard: SavedShard) -> StatesFile:
        """Return the file that is read first for a saved shard."""
        # The DP ranks that have a part of it are `expert_rank`, `expert_rank + experts`, …
        number = self._preferred_rank // shard.experts
        data_rank = number * shard.experts + shard.expert_rank
        return self._file(shard.tensor_rank, data_rank)

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        """Write this rank's shard of a parameter's weight into `local`."""
        wanted = ParameterLayout(layout, tuple(whole))
        saved = self.parameters.get(name)
        # The whole shapes must agree. The layouts may differ: `piece` maps one to the other.
        if saved is None or saved.shape != wanted.shape:
            problem = (
                "no such parameter"
                if saved is None
                else f"shape {saved.shape}, expected {wanted.shape}"
            )
            raise UserError(f"{self.directory}: {name}: {problem}")
        piece = self.piece(name, self._weight_kind(name), wanted, Place.of(topology))
        local.copy_(piece.view(local.shape))

    def piece(
        self,
        name: str,
        kind: str,
        wanted: ParameterLayout,
        place: Place,
        elements: slice | None = None,
    ) -> Tensor:
        """Return elements of the flattened shard of a place, fp32 [numel].

        A fused QKV of 4 + 2 + 2 rows, saved at TP 2. At TP 1 a ZeRO fragment wants the rows 1 to 5:

            saved rank 0    q0 q1 k0 v0          its row 1 → the block's row 0, 2 → 3
            saved rank 1    q2 q3 k1 v1          its rows 0 and 1 → 1 and 2, 2 → 4
            wanted shard    q0 q1 q2 q3 k0 k1 v0 v1
            block              q1 q2 q3 k0 k1

        Only these rows are read, from the files that have them. Files hold fragments with the place
        of their first element, so it does not matter at which ZeRO stage they were saved.

        Args:
            wanted: the parameter's layout there, with the same whole shape.
            elements: by default all.
        """
        wanted_spans = wanted.spans(place)
        shape = [along.local_length for along in wanted_spans]
        start, stop, _ = (elements or slice(None)).indices(math.prod(shape))
        equal = self._equal_shard(name, wanted, place)
        if equal is not None:
            return self._elements(name, kind, equal, start, stop)
        return self._reshaped(name, kind, wanted_spans, start, stop)

    def _equal_shard(self, name: str, wanted: ParameterLayout, place: Place) -> SavedShard | None:
        """Return a saved shard with the elements of a wanted one in their order, which needs no
        reshaping; None: there is none.

        There is one at the same sizes, and for a replicated parameter at any.
        """
        saved = self.parameters[name]
        # At the same sizes the rank's own file; else rank 0's, which is enough for a replica.
        rank = place.tensor_rank if place.tensor == self.tensor else 0
        same_experts = saved.layout.experts == wanted.layout.experts
        expert_rank = place.expert_rank if same_experts else 0
        if saved.spans(Place(rank, self.tensor, expert_rank)) != wanted.spans(place):
            return None
        return self._saved_shard(name, rank, expert_rank)

    def _reshaped(
        self, name: str, kind: str, wanted: tuple[Spans, ...], start: int, stop: int
    ) -> Tensor:
        """Return elements [start, stop) of a shard, joined from saved shards of another shape."""
        shape = [along.local_length for along in wanted]
        # A ZeRO fragment may begin and end inside a row, but the maps are of whole rows and
        # columns. So read the smallest block around it, and cut it at the end.
        index, offset = enclosing_block(shape, start, stop)
        target = [along.narrow(rows) for along, rows in zip(wanted, index, strict=True)]
        block = torch.zeros([along.local_length for along in target])  # padding stays zero
        for source, saved_shard in self._holders(name).items():
            for saved_index, block_index in overlaps(source, target):
                block[block_index] = self._block(name, kind, saved_shard, saved_index)
        return block.flatten()[offset : offset + stop - start]

    def _holders(self, name: str) -> dict[tuple[Spans, ...], SavedShard]:
        """Return each saved shard's map along each dimension → the first TP rank that has it."""
        saved = self.parameters[name]
        # Ranks with equal maps hold the same elements: all ranks, of a replicated parameter.
        # Reversed, because the last entry of a key stays: the first rank.
        return {
            saved.spans(Place(rank, self.tensor, expert_rank)): self._saved_shard(
                name, rank, expert_rank
            )
            for expert_rank in range(saved.layout.experts)
            for rank in reversed(range(self.tensor))
        }

    def _saved_shard(self, name: str, tensor_rank: int, expert_rank: int) -> SavedShard:
        experts = self.parameters[name].layout.experts
        return SavedShard(tensor_rank, expert_rank % experts, experts)

    def _block(self, name: str, kind: str, shard: SavedShard, index: Index) -> Tensor:
        """Return a block of a saved shard as a view of the elements from its first to its last.

        The block [0:2, 1:3] of a shard [3, 4]:

            . b c .     elements [1, 7) are read: b c . . f g
            . f g .     as_strided((2, 2), (4, 1)) gives [[b, c], [f, g]], and copies nothing
            . . . .
        """
        saved = self.parameters[name]
        shape = saved.layout.local_shape(saved.shape, self.tensor)
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(rows.start * stride for rows, stride in zip(index, strides, strict=True))
        last = sum((rows.stop - 1) * stride for rows, stride in zip(index, strides, strict=True))
        elements = self._elements(name, kind, shard, first, last + 1)
        return elements.as_strided([rows.stop - rows.start for rows in index], strides)

    def _weight_kind(self, name: str) -> str:
        return EMA if name in self._averaged else MASTER

    def weight(self, name: str) -> Tensor:
        """Return the whole parameter's weight, as `fill` gives it, without padding, fp32."""
        return self.whole(name, self._weight_kind(name))

    def whole(self, name: str, kind: str = MASTER) -> Tensor:
        """Return the whole parameter's master or state, without padding, fp32."""
        shape = self.parameters[name].shape
        wanted = ParameterLayout(Replicated(), shape)
        return self.piece(name, kind, wanted, Place(0, 1)).view(shape)

    def _elements(self, name: str, kind: str, shard: SavedShard, start: int, stop: int) -> Tensor:
        """Return elements of a saved shard from the files of the DP ranks that have them.

        Elements [2, 9) of a shard of 10, saved by DP 3 in fragments that start at 0, 4 and 8:

            preferred file, of DP rank 1    begins at 4: nothing of element 2
            file of DP rank 0               [2, 4)
            file of DP rank 1               [4, 8)
            file of DP rank 2               [8, 9)
        """
        # On the grid that saved the checkpoint this file has everything, and no other one is
        # opened. `verify_checkpoint` has just read it, so it is in the page cache.
        pieces = [self._preferred_file(shard).elements(name, kind, start, stop)]
        position = start + len(pieces[0])
        fragments = self._fragments_of(name, shard) if position < stop else []
        while position < stop:
            # The last fragment that begins at or before the position. -1, if all begin later,
            # becomes 0: that file then gives nothing, which is reported below.
            index = max(bisect_right(fragments, position, key=itemgetter(0)) - 1, 0)
            pieces.append(
                fragments[index][1].elements(name, kind, position, stop)
                if fragments
                else torch.empty(0)
            )
            if not len(pieces[-1]):
                problem = f"the files lack elements [{position}, {stop}) of {name} ({kind})"
                raise Damaged(self.directory / MANIFEST, problem)
            position += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
