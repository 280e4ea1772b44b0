"""The fp32 master weights, whoever holds them: one file a rank, read back as whole tensors.

Every rank holds, of each parameter's TP shard, one run of consecutive elements: all of it under ZeRO-0, its DP
partition under ZeRO-1 to 3. That run and where it starts is all that is written, so a reader needs the layouts and
nothing of DeepSpeed, and opens no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from zero_tp.errors import UserError
from zero_tp.models.architectures import Weight
from zero_tp.parallel.layout import Layout, layout_of, local_shape, whole_shape

if TYPE_CHECKING:
    from zero_tp.training.engine import TrainingEngine

Fragment = tuple[str, int, Tensor]


def masters_file(tensor_rank: int, data_rank: int) -> str:
    return f"masters_tp{tensor_rank:02d}_dp{data_rank:04d}.safetensors"


def _zero3_fragment(parameter: nn.Parameter, data_rank: int) -> tuple[int, Tensor]:
    from deepspeed.utils import safe_get_local_fp32_param

    partition = safe_get_local_fp32_param(parameter).detach().flatten()
    start = data_rank * partition.numel()
    whole: int = parameter.ds_numel  # type: ignore[attr-defined]
    return start, partition[: max(0, min(partition.numel(), whole - start))]


def unpartitioned_masters(optimizer: Any, parameters: list[nn.Parameter]) -> dict[int, Tensor]:
    """Masters of ZeRO-0 by id of the parameter: itself in fp32, else its copy in DeepSpeed's wrapper."""
    if not hasattr(optimizer, "loss_scale_config"):
        return {id(parameter): parameter for parameter in parameters}
    masters: dict[int, Tensor] = {}
    if hasattr(optimizer, "fp32_groups"):
        for halves, fulls in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            masters.update((id(half), full) for half, full in zip(halves, fulls, strict=True))
    else:
        for halves, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
            pieces = flat.detach().split([half.numel() for half in halves])
            masters.update((id(half), piece) for half, piece in zip(halves, pieces, strict=True))
    return masters


def master_fragments(engine: TrainingEngine) -> Iterator[Fragment]:
    """(parameter name, first element in the flattened TP shard, fp32 elements) that this rank holds."""
    named = list(engine.model.named_parameters())
    if engine.stage == 0:
        if engine.topology.data_rank == 0:
            masters = unpartitioned_masters(engine.optimizer, [parameter for _, parameter in named])
            for name, parameter in named:
                yield name, 0, masters[id(parameter)].detach().flatten()
        return
    for name, parameter in named:
        if engine.stage == 3:
            start, fragment = _zero3_fragment(parameter, engine.topology.data_rank)
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                continue
            start, fragment = mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach().flatten()
        if fragment.numel():
            yield name, start, fragment


def save_masters(engine: TrainingEngine, directory: Path) -> None:
    """Write this rank's fragments. No communication."""
    fragments = {name: (start, tensor.float().cpu()) for name, start, tensor in master_fragments(engine)}
    starts = {name: start for name, (start, _) in fragments.items()}
    file = masters_file(engine.topology.tensor_rank, engine.topology.data_rank)
    tensors = {name: tensor.clone() for name, (_, tensor) in fragments.items()}
    save_file(tensors, directory / file, {"starts": json.dumps(starts)})


def describe_layouts(model: nn.Module) -> dict[str, Any]:
    """Each parameter's layout and shapes, for the manifest."""
    described = {}
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        described[name] = {
            "layout": type(layout).__name__,
            **vars(layout),
            "shape": list(whole_shape(parameter)),
            "shard_shape": list(local_shape(parameter)),
        }
    return described


class MasterReader:
    """The whole fp32 tensors of a checkpoint, one at a time."""

    def __init__(self, directory: Path, tensor: int, data: int):
        """
        Args:
            directory: that of the `masters_*` files.
            tensor, data: the sizes that saved it.

        Raises:
            UserError: a file is missing or not readable.
        """
        self.directory, self.tensor = directory, tensor
        self._files: list[list[tuple[Any, dict[str, int]]]] = []
        for tensor_rank in range(tensor):
            opened = []
            for data_rank in range(data):
                path = directory / masters_file(tensor_rank, data_rank)
                try:
                    file = safe_open(path, framework="pt")
                    starts = json.loads(file.metadata()["starts"])
                except Exception as error:
                    raise UserError(f"{path}: cannot be read ({error}); the checkpoint is damaged") from error
                opened.append((file, starts))
            self._files.append(opened)

    def _shard(self, name: str, tensor_rank: int, shape: tuple[int, ...]) -> Tensor:
        flat = torch.empty(torch.Size(shape).numel(), dtype=torch.float32)
        found = 0
        for file, starts in self._files[tensor_rank]:
            if name in starts:
                fragment = file.get_tensor(name)
                flat[starts[name] : starts[name] + fragment.numel()] = fragment
                found += fragment.numel()
        if found != flat.numel():
            raise UserError(
                f"{self.directory}: {name} has {found} of {flat.numel()} elements; the checkpoint is damaged"
            )
        return flat.view(shape)

    def whole(self, name: str, layout: Layout, shard_shape: tuple[int, ...]) -> Tensor:
        """The whole parameter from its shards.

        Raises:
            UserError: elements are missing.
        """
        return layout.unshard([self._shard(name, rank, shard_shape) for rank in range(self.tensor)])

    def native(
        self, weights: Iterator[Weight], layouts: dict[str, tuple[Layout, tuple[int, ...]]]
    ) -> dict[str, Tensor]:
        """Every whole tensor by its Hugging Face name."""
        return {weight.theirs: weight.convert(self.whole(weight.ours, *layouts[weight.ours])) for weight in weights}
