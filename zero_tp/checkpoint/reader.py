"""A reader gives pieces of a checkpoint's masters and moments, cut as another topology wants them.

The layouts, written in the manifest, say how each parameter was split; one parameter is in memory at a time. What is
read of a file is compared with its hash as it is read.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zero_tp.checkpoint.directory import MANIFEST, Damaged, check_file, check_sizes
from zero_tp.checkpoint.manifest import (
    Manifest,
    ManifestFile,
    ReplicatedParameter,
    ShardedParameter,
    states_file,
)
from zero_tp.errors import UserError, first_line
from zero_tp.parallel.layout import Layout, Replicated, Sharded, layout_of, whole_shape
from zero_tp.parallel.parameter import Init
from zero_tp.strict_json import parse_json
from zero_tp.tensors import files
from zero_tp.tensors.files import Destination, read_header
from zero_tp.topology import Topology
from zero_tp.zero.states import MASTER, Fragment, OptimizerStates

STARTS = "starts"
RANDOM = "random"  # streams are named RANDOM/…


def tensor_name(parameter: str, kind: str) -> str:
    return f"{parameter}/{kind}"


@dataclass(frozen=True)
class Described:
    """A parameter has this layout and whole shape, says the manifest."""

    layout: Layout
    shape: tuple[int, ...]

    @classmethod
    def of(cls, parameter: nn.Parameter) -> Described:
        return cls(layout_of(parameter), whole_shape(parameter))

    @classmethod
    def from_manifest(cls, entry: ShardedParameter | ReplicatedParameter) -> Described:
        shape = tuple(entry.shape)
        if isinstance(entry, ShardedParameter):
            return cls(Sharded(entry.dim, tuple(entry.parts), entry.padded), shape)
        return cls(Replicated(entry.gradient), shape)

    def to_json(self) -> dict[str, Any]:
        return {"layout": type(self.layout).__name__, **vars(self.layout), "shape": list(self.shape)}

    def same_split(self, other: Described) -> bool:
        """Return whether both give every TP rank of one size the same elements."""
        both_replicated = isinstance(self.layout, Replicated) and isinstance(other.layout, Replicated)
        return both_replicated or self.layout == other.layout


def destinations_of(
    file: Path, states: OptimizerStates, pieces: Iterable[tuple[Fragment, str]]
) -> dict[tuple[str, str], Destination]:
    """Return where the bytes of each (parameter, kind) belong that the file holds exactly as this rank does.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read.
    """
    header, base = read_header(file)
    starts, destinations = parse_json(header["__metadata__"][STARTS]), {}
    for fragment, kind in pieces:
        found = header.get(tensor_name(fragment.name, kind))
        target = states.get(fragment, kind)
        if found is None or target.dtype != torch.float32 or found["dtype"] != "F32":
            continue
        if starts[fragment.name] == fragment.start and found["shape"] == [fragment.numel]:
            first, last = found["data_offsets"]
            assert last - first == 4 * fragment.numel, f"{file}: {fragment.name} ({kind}) is not as long as its shape"
            destinations[fragment.name, kind] = Destination(base + first, target.view(torch.uint8))
    return destinations


class StatesFile:
    """A rank's file of a checkpoint is read; each part of 8 MiB that is read is compared with its hash first, once.

    Of a thousand files a rank reads tensors of a few: the others are closed again once `starts` is read.

    Attributes:
        starts: the first element of each parameter's fragment in the TP shard.

    Raises:
        Damaged: from every method; the file cannot be read, or is not as it was written.
    """

    def __init__(self, path: Path, manifested: ManifestFile | None):
        """Open the file and read its header.

        Args:
            manifested: what the manifest says of it; None where its hash is compared elsewhere.
        """
        self.path = path
        self._parts = manifested.parts if manifested is not None else []
        self._compared: set[int] = set()
        if manifested is not None:
            check_sizes(path.parent, {path.name: manifested})
        if manifested is not None and len(self._parts) != -(-manifested.bytes // files.PART):
            check_file(path, manifested)  # saved before the parts were listed
            self._parts = []
        try:
            self._compare(0, 1)
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
            self._compare(0, 8 + length)
            starts = parse_json(read_header(path)[0]["__metadata__"][STARTS])
            self.starts: dict[str, int] = {sys.intern(name): first for name, first in starts.items()}
        except Damaged:
            raise
        except Exception as error:  # what is damaged is anything
            raise Damaged(path, f"cannot be read ({first_line(error)})") from error

    @cached_property
    def _opened(self) -> tuple[Any, dict[str, Any], int]:
        """Return (the file as safetensors reads it, its header, the byte from which the header's offsets count)."""
        try:
            return safe_open(self.path, framework="pt"), *read_header(self.path)
        except Exception as error:  # safetensors' own type derives from nothing narrower
            raise Damaged(self.path, f"cannot be read ({first_line(error)})") from error

    def _compare(self, start: int, stop: int) -> None:
        """Compare the parts that hold the bytes [start, stop) with their hashes."""
        wanted = range(start // files.PART, min(-(-stop // files.PART), len(self._parts)))
        missing = [part for part in wanted if part not in self._compared]
        if not missing:
            return
        try:
            found = files.hash_parts(self.path, missing)
        except OSError as error:
            raise Damaged(self.path, f"cannot be read ({error.strerror})") from error
        for part, digest in zip(missing, found, strict=True):
            if digest != self._parts[part]:
                raise Damaged(self.path, f"SHA-256 of part {part} is {digest[:12]}…, not {self._parts[part][:12]}…")
        self._compared.update(missing)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each tensor."""
        _, header, _ = self._opened
        offsets = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
        return {name: stop - start for name, (start, stop) in offsets.items()}

    def length(self, name: str) -> int:
        """Return the elements of a tensor of one dimension."""
        _, header, _ = self._opened
        if name not in header:
            raise Damaged(self.path, f"holds no {name}")
        length: int = header[name]["shape"][0]
        return length

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; it is mapped into memory, so what is used of it is read once more then, from the cache."""
        file, header, base = self._opened
        first, last = header[name]["data_offsets"]
        self._compare(base + first, base + last)
        tensor: Tensor = file.get_tensor(name)
        return tensor


class CheckpointReader:
    """A reader holds the tensors of one checkpoint; as a `WeightSource`, a new model's weights are its fp32 masters.

    Attributes:
        parameters: every parameter by name.
        tensor, data: the sizes that saved it.
    """

    def __init__(self, directory: Path, manifest: Manifest, *, compared: bool = True):
        """Open a checkpoint; a file is opened when something of its TP rank is read first.

        Args:
            compared: what is read is compared with its hash; False beside a `Verification`, which reads all files.

        Raises:
            Damaged: the manifest describes parameters that cannot be; from every other method: a file is missing, not
                readable or not as it was written.
        """
        self.directory, self._compared = directory, compared
        self._manifested = manifest.files
        self.tensor, self.data = manifest.tensor, manifest.data
        self.parameters = {name: Described.from_manifest(entry) for name, entry in manifest.parameters.items()}
        for name, saved in self.parameters.items():
            try:
                saved.layout.local_shape(saved.shape, self.tensor)
            except ValueError as error:
                raise Damaged(directory / MANIFEST, f"parameters.{name}: {error}") from error
        # Memory that was never touched costs more to get than to fill.
        self._scratch = [torch.empty(0) for _ in range(self.tensor)]
        self._holders: dict[int, dict[str, list[tuple[int, StatesFile]]]] = {}

    def _holders_of(self, name: str, tensor_rank: int) -> list[tuple[int, StatesFile]]:
        """Return (first element, file) of each fragment of a TP rank's shard, in order. It reads all its headers."""
        if tensor_rank not in self._holders:
            holders: dict[str, list[tuple[int, StatesFile]]] = {}
            for file_name in (states_file(tensor_rank, data_rank) for data_rank in range(self.data)):
                manifested = self._manifested[file_name] if self._compared else None
                file = StatesFile(self.directory / file_name, manifested)
                for parameter, first in file.starts.items():
                    holders.setdefault(parameter, []).append((first, file))
            for fragments in holders.values():
                fragments.sort(key=itemgetter(0))
            self._holders[tensor_rank] = holders
        return self._holders[tensor_rank].get(name, [])

    def fill(
        self, local: Tensor, name: str, whole: Sequence[int], layout: Layout, init: Init, topology: Topology
    ) -> None:
        """Write this rank's shard of a parameter's master into `local`.

        Raises:
            UserError: the checkpoint lacks the parameter, or has it in another shape.
        """
        wanted, saved = Described(layout, tuple(whole)), self.parameters.get(name)
        if saved is None or saved.shape != wanted.shape:
            there = "no such parameter" if saved is None else f"{saved.shape}"
            raise UserError(f"{self.directory}: {name}: expected shape {wanted.shape}, found {there}")
        piece = self.piece(name, MASTER, wanted, topology.tensor_rank, topology.tensor)
        local.copy_(piece.view(local.shape))

    def piece(
        self, name: str, kind: str, wanted: Described, rank: int, size: int, start: int = 0, numel: int | None = None
    ) -> Tensor:
        """Return elements [start, start + numel) of the flattened shard of `rank` of `size` TP ranks, fp32 [numel].

        Args:
            wanted: how the parameter lies there; its whole shape is the same.
            numel: by default all from `start` on.

        Raises:
            Damaged: elements are missing or not as they were written.
        """
        if numel is None:
            numel = math.prod(wanted.layout.local_shape(wanted.shape, size)) - start
        saved = self.parameters[name]
        if saved.same_split(wanted) and (size == self.tensor or isinstance(saved.layout, Replicated)):
            return self._elements(name, kind, rank if size == self.tensor else 0, start, numel)
        # As [outer, rows, inner], where the layouts split the rows.
        dim = saved.layout.dim if isinstance(saved.layout, Sharded) else wanted.layout.dim
        shape = wanted.layout.local_shape(wanted.shape, size)
        rows, inner = shape[dim], math.prod(shape[dim + 1 :])
        outer = range(start // (rows * inner), -(-(start + numel) // (rows * inner)))
        at = outer.start * rows * inner
        near = (0, rows) if len(outer) > 1 else ((start - at) // inner, -(-(start + numel - at) // inner))
        block = torch.zeros(len(outer), near[1] - near[0], inner)  # what is padding stays so
        for holder in range(1 if isinstance(saved.layout, Replicated) else self.tensor):
            for first, last, place in _held(saved, dim, holder, self.tensor):
                for begin, end, here in _held(wanted, dim, rank, size):
                    low, high = max(first, begin, begin + near[0] - here), min(last, end, begin + near[1] - here)
                    if low < high:
                        target = block[:, low - begin + here - near[0] : high - begin + here - near[0]]
                        target.copy_(self._rows(name, kind, holder, dim, outer, place + low - first, high - low))
        return block.flatten()[start - at - near[0] * inner :][:numel]

    def _rows(self, name: str, kind: str, holder: int, dim: int, outer: range, first: int, count: int) -> Tensor:
        """Return `count` rows from `first` on of a saved shard [all outer, rows, inner] → [outer, count, inner]."""
        saved = self.parameters[name]
        shape = saved.layout.local_shape(saved.shape, self.tensor)
        inner = math.prod(shape[dim + 1 :])
        step, length = shape[dim] * inner, count * inner
        start = outer.start * step + first * inner
        held = self._elements(name, kind, holder, start, (len(outer) - 1) * step + length)
        return held.as_strided((len(outer), count, inner), (step, inner, 1))

    def whole(self, name: str, kind: str = MASTER) -> Tensor:
        """Return the whole parameter's master or state, without padding, fp32."""
        saved = self.parameters[name]
        if isinstance(saved.layout, Replicated):
            return self._shard(name, kind, 0)
        return saved.layout.unshard([self._shard(name, kind, rank, self._scratch) for rank in range(self.tensor)])

    def _shard(self, name: str, kind: str, tensor_rank: int, scratch: list[Tensor] | None = None) -> Tensor:
        saved = self.parameters[name]
        shape = saved.layout.local_shape(saved.shape, self.tensor)
        own = None if scratch is None else scratch[tensor_rank]
        return self._elements(name, kind, tensor_rank, 0, math.prod(shape), own).view(shape)

    def _elements(
        self, name: str, kind: str, tensor_rank: int, start: int, numel: int, scratch: Tensor | None = None
    ) -> Tensor:
        """Return elements of a saved shard, from whichever data-parallel ranks had them.

        Pieces are joined in `scratch`, which grows, so that what is returned lasts until the next call with it; by
        default in new memory.
        """
        tensor, holders = tensor_name(name, kind), self._holders_of(name, tensor_rank) if numel else []
        pieces, stop, at = [], start + numel, start
        while at < stop:
            before = reversed(holders[: bisect_right(holders, at, key=itemgetter(0))])
            found = next((each for each in before if at < each[0] + each[1].length(tensor)), None)
            if found is None:
                problem = f"{name} ({kind}) ends in the files at element {at}, not {stop}"
                raise Damaged(self.directory / MANIFEST, problem)
            first, file = found
            pieces.append(file.tensor(tensor)[at - first : stop - first])
            at += len(pieces[-1])
        if len(pieces) == 1:
            return pieces[0]
        if scratch is None or not pieces:
            return torch.cat(pieces) if pieces else torch.empty(0)
        return torch.cat(pieces, out=scratch.resize_(numel))


def _held(parameter: Described, dim: int, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, place): rows of the whole along `dim` that one of `size` TP ranks holds, and where in its
    shard."""
    if isinstance(parameter.layout, Replicated):
        yield 0, parameter.shape[dim], 0
        return
    place = 0
    for start, stop, padding in parameter.layout.ranges(rank, size):
        yield start, stop, place
        place += stop - start + padding
