"""Read torch's distributed checkpoints (DCP), as Megatron, OLMo-core and torchtitan write them.

A folder has a pickle `.metadata`, which names the chunks of each tensor, and `.distcp` files, in
which each chunk is an archive of `torch.save`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zero_tp.base.errors import UserError
from zero_tp.parallel.spans import Index, Span, Spans
from zero_tp.tools.checkpoint_import.stored_tensors import (
    FileTensor,
    JoinedTensor,
    Piece,
    StoredTensor,
)
from zero_tp.tools.checkpoint_import.unpickling import InertObject, load_pickle, load_torch

METADATA = ".metadata"


@dataclass(frozen=True)
class Region:
    """The bytes of a chunk or an object in a `.distcp` file."""

    path: Path
    start: int
    size: int


@dataclass(frozen=True)
class DistributedCheckpoint:
    """The content of a folder.

    Attributes:
        tensors: by name.
        objects: name → the pickle of what is no tensor (`load_object`).
    """

    tensors: dict[str, StoredTensor]
    objects: dict[str, Region]


@dataclass(frozen=True)
class _Chunk:
    """A chunk, whose archive is opened when it is read."""

    region: Region
    shape: tuple[int, ...]
    dtype: torch.dtype

    @cached_property
    def stored(self) -> FileTensor:
        stored = load_torch(self.region.path, self.region.start, self.region.size)
        if (
            not isinstance(stored, FileTensor)
            or stored.shape != self.shape
            or stored.dtype != self.dtype
        ):
            raise UserError(
                f"{self.region.path}: its chunk at {self.region.start} is {stored!r} and not the "
                f"tensor of shape {self.shape} that {METADATA} names; copy the checkpoint again"
            )
        return stored

    def read(self, index: Index) -> torch.Tensor:
        return self.stored.read(index)

    def fill(self, target: torch.Tensor, index: Index) -> None:
        self.stored.fill(target, index)


def is_distributed(folder: Path) -> bool:
    """Return whether a folder is a distributed checkpoint of torch."""
    return (folder / METADATA).is_file()


def load_object(region: Region) -> Any:
    """Return an object of a `.distcp` file, such as counters."""
    return load_torch(region.path, region.start, region.size)


def open_distributed(folder: Path) -> DistributedCheckpoint:
    """Open a distributed checkpoint without reading its tensors.

    Raises:
        UserError: it is damaged, or written in a way that is not read.
    """
    path = folder / METADATA
    metadata = load_pickle(path)
    try:
        entries = metadata.fields["state_dict_metadata"]
        regions = _regions(folder, metadata.fields["storage_data"])
        tensors = dict[str, StoredTensor]()
        objects = dict[str, Region]()
        for name, entry in entries.items():
            if "chunks" in entry.fields:
                tensors[name] = _tensor(name, entry, regions)
            else:
                objects[name] = regions[name, None]
    except UserError:
        raise  # which is a ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: is no metadata of a distributed checkpoint "
            f"({type(error).__name__}: {error}); give a checkpoint of torch.distributed.checkpoint"
        ) from error
    return DistributedCheckpoint(tensors, objects)


def _regions(
    folder: Path, storage: Mapping[InertObject, InertObject]
) -> dict[tuple[str, tuple[int, ...] | None], Region]:
    """Return (tensor, its chunk's offsets) or (object, None) → where it is."""
    regions = {}
    for key, value in storage.items():
        fields = value.fields
        if fields.get("transform_descriptors"):
            raise UserError(
                f"{folder}: its files are transformed ({fields['transform_descriptors'][0]}); "
                "write the checkpoint without extensions"
            )
        file = fields["relative_path"]
        # A name such as `../file` could read another file of the user.
        if Path(file).name != file:
            raise ValueError(f"{file!r} is not the name of a file beside it")
        offsets = key.fields.get("offset")
        name = key.fields["fqn"], None if offsets is None else tuple(offsets)
        regions[name] = Region(folder / file, fields["offset"], fields["length"])
    _check_files(regions.values())
    return regions


def _check_files(regions: Iterable[Region]) -> None:
    """Check that all files are whole, before hours of work."""
    ends = dict[Path, int]()
    for region in regions:
        ends[region.path] = max(ends.get(region.path, 0), region.start + region.size)
    for path, end in sorted(ends.items()):
        size = path.stat().st_size if path.is_file() else None
        if size is None or size < end:
            problem = "missing" if size is None else f"has {size:,} of {end:,} bytes"
            raise UserError(f"{path}: {problem}; copy the checkpoint again")


def _tensor(
    name: str, entry: InertObject, regions: Mapping[tuple[str, tuple[int, ...] | None], Region]
) -> StoredTensor:
    """Return a tensor of chunks."""
    properties = entry.fields["properties"]
    # TensorProperties has a state of its own: a tuple that begins with the dtype.
    dtype = properties.fields.get("dtype") or properties.state[0]
    shape = tuple(entry.fields["size"])
    if not isinstance(dtype, torch.dtype) or not all(isinstance(size, int) for size in shape):
        raise ValueError(f"{name} has no dtype and sizes")
    pieces = []
    for chunk in entry.fields["chunks"]:
        offsets, sizes = tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])
        spans = tuple(
            Spans((Span(start, 0, length),), whole, length)
            for start, length, whole in zip(offsets, sizes, shape, strict=True)
        )
        pieces.append(Piece(spans, _Chunk(regions[name, offsets], sizes, dtype)))
    if sum(math.prod(piece.tensor.shape) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the chunks of {name} are not the whole of {shape}")
    return JoinedTensor(shape, dtype, tuple(pieces))
