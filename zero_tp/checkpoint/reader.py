"""A reader gives pieces of a checkpoint's masters and moments, cut as another topology wants them.

The layouts, written in the manifest, say how each parameter was split; one parameter is in memory at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zero_tp.errors import UserError
from zero_tp.parallel.layout import Layout, Replicated, Sharded, layout_of, whole_shape
from zero_tp.parallel.parameter import Init
from zero_tp.tensors.files import Destination, read_header
from zero_tp.topology import Topology
from zero_tp.zero.states import MASTER, Fragment, OptimizerStates

STARTS = "starts"


def states_file(tensor_rank: int, data_rank: int) -> str:
    """Name a rank's file, whose metadata `starts` holds each parameter's first element in the TP shard."""
    return f"states_tp{tensor_rank:02d}_dp{data_rank:04d}.safetensors"


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
    def from_json(cls, entry: dict[str, Any]) -> Described:
        shape = tuple(entry["shape"])
        if entry["layout"] == "Sharded":
            return cls(Sharded(entry["dim"], tuple(entry["parts"]), entry["padded"]), shape)
        return cls(Replicated(entry["gradient"]), shape)

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
    starts, destinations = json.loads(header["__metadata__"][STARTS]), {}
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


class CheckpointReader:
    """A reader holds the tensors of one checkpoint; as a `WeightSource`, a new model's weights are its fp32 masters.

    Attributes:
        parameters: every parameter by name.
        tensor, data: the sizes that saved it.
    """

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        """Open the checkpoint's files.

        Raises:
            UserError: a file is missing or not readable.
        """
        self.directory = directory
        self.tensor, self.data = int(manifest["tensor"]), int(manifest["data"])
        self.parameters = {name: Described.from_json(entry) for name, entry in manifest["parameters"].items()}
        # Memory that was never touched costs more to get than to fill.
        self._scratch = [torch.empty(0) for _ in range(self.tensor)]
        self._files = [
            [self._open(states_file(tensor_rank, data_rank)) for data_rank in range(self.data)]
            for tensor_rank in range(self.tensor)
        ]

    def _open(self, name: str) -> tuple[Any, dict[str, int]]:
        path = self.directory / name
        try:
            file = safe_open(path, framework="pt")
            return file, json.loads(file.metadata()[STARTS])
        except Exception as error:  # safetensors' own type derives from nothing narrower
            raise UserError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error

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
            UserError: elements are missing.
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
        holders = [(starts[name], file) for file, starts in self._files[tensor_rank] if name in starts]
        for first, file in sorted(holders, key=lambda holder: holder[0]):
            held = file.get_tensor(tensor_name(name, kind))  # mapped into memory: what is used of it is read then
            last = first + len(held)
            if first <= at < min(last, stop):
                pieces.append(held[at - first : stop - first])
                at = min(last, stop)
        if at != stop:
            raise UserError(
                f"{self.directory}: {name} ({kind}) ends at element {at}, not {stop}; the checkpoint is damaged"
            )
        if len(pieces) == 1:
            return pieces[0]
        if scratch is None or not pieces:
            return torch.cat(pieces) if pieces else torch.empty(0)
        return torch.cat(pieces, out=scratch.resize_(numel))
