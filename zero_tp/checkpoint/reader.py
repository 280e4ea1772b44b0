"""A reader gives pieces of a checkpoint's masters and moments, cut as another topology wants them.

The layouts, written in the manifest, say how each parameter was split; one parameter is in memory at a time. What is
read of a file is compared with its hash as it is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
            self._header, self._base = read_header(path)
            self._file = safe_open(path, framework="pt")
            self.starts: dict[str, int] = parse_json(self._file.metadata()[STARTS])
        except Damaged:
            raise
        except Exception as error:  # safetensors' own type derives from nothing narrower; what is damaged is anything
            raise Damaged(path, f"cannot be read ({first_line(error)})") from error

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
        offsets = {name: entry["data_offsets"] for name, entry in self._header.items() if name != "__metadata__"}
        return {name: stop - start for name, (start, stop) in offsets.items()}

    def length(self, name: str) -> int:
        """Return the elements of a tensor of one dimension."""
        if name not in self._header:
            raise Damaged(self.path, f"holds no {name}")
        length: int = self._header[name]["shape"][0]
        return length

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; it is mapped into memory, so what is used of it is read once more then, from the cache."""
        first, last = self._header[name]["data_offsets"]
        self._compare(self._base + first, self._base + last)
        tensor: Tensor = self._file.get_tensor(name)
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
        self._opened: dict[int, list[StatesFile]] = {}

    def _files(self, tensor_rank: int) -> list[StatesFile]:
        """Return the files of a TP rank's data-parallel ranks. At a thousand ranks a rank can't open those of all."""
        if tensor_rank not in self._opened:
            names = [states_file(tensor_rank, data_rank) for data_rank in range(self.data)]
            self._opened[tensor_rank] = [
                StatesFile(self.directory / name, self._manifested[name] if self._compared else None) for name in names
            ]
        return self._opened[tensor_rank]

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
        shard = wanted.layout.shard(self.whole(name, kind), rank, size)
        return shard.flatten()[start : start + numel]

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
        pieces, stop, at = [], start + numel, start
        holders = [(file.starts[name], file) for file in self._files(tensor_rank) if name in file.starts]
        for first, file in sorted(holders, key=lambda holder: holder[0]):
            last = first + file.length(tensor_name(name, kind))
            if first <= at < min(last, stop):
                held = file.tensor(tensor_name(name, kind))
                pieces.append(held[at - first : stop - first])
                at = min(last, stop)
        if at != stop:
            raise Damaged(self.directory / MANIFEST, f"{name} ({kind}) ends in the files at element {at}, not {stop}")
        if len(pieces) == 1:
            return pieces[0]
        if scratch is None or not pieces:
            return torch.cat(pieces) if pieces else torch.empty(0)
        return torch.cat(pieces, out=scratch.resize_(numel))
