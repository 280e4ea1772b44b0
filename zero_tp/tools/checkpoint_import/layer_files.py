"""Files of models that are both tensor parallel and DeepSpeed's: Megatron-DeepSpeed, GPT-NeoX.

layer_03-model_01-model_states.pt    of one layer and TP rank, with pipelines
mp_rank_01_model_states.pt           of a TP rank: all weights without pipelines; args with both
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.parallel.spans import Index
from zero_tp.tools.checkpoint_import.stored_tensors import StoredTensor
from zero_tp.tools.checkpoint_import.unpickling import load_torch, tensors_in

LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
RANK_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
SHARDED_FILE = re.compile(r"zero_pp_rank_\d+_mp_rank_\d+_model_states\.pt")
EXPERT_FILE = re.compile(r"(layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")
STATES_FILE = re.compile(r"(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_optim_states\.pt")

LayerTensors = dict[str, StoredTensor]


def files_like(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files of a folder whose names are like a pattern, sorted."""
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name))


def first_state(folder: Path) -> dict[str, Any]:
    """Return what the first rank's file holds; empty if there is none."""
    files = files_like(folder, RANK_FILE) or files_like(folder, SHARDED_FILE)
    content = load_torch(files[0]) if files else {}
    return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class RankTensors:
    """The weights of a model by TP rank.

    Attributes:
        ranks: for each TP rank, the tensors by name. With pipelines a name begins with the number
            of its layer's file, such as `3.input_layernorm.weight`.
        pipelines: a layer has files of its own.
        states: number of files with the optimizer's states.
    """

    ranks: tuple[LayerTensors, ...]
    pipelines: bool
    states: int


def read_ranks(folder: Path) -> RankTensors:
    """Open the weights of a folder.

    Raises:
        UserError: files are missing or damaged; the weights are sharded by ZeRO-3, or experts.
    """
    if (folder / "zero").is_dir():
        raise UserError(
            f"{folder}: universal checkpoints of this trainer are not read; give the step that it "
            "was made of"
        )
    experts = files_like(folder, EXPERT_FILE)
    if experts:
        raise UserError(f"{experts[0]}: experts of DeepSpeed are not read; give a dense model")
    layers = files_like(folder, LAYER_FILE)
    whole = files_like(folder, RANK_FILE)
    if not layers and not whole and not files_like(folder, SHARDED_FILE):
        raise UserError(
            f"{folder}: has no layer_NN-model_NN-model_states.pt nor mp_rank_NN_model_states.pt; "
            "give a step of this trainer, or another --format"
        )
    if not layers and not whole:
        raise UserError(
            f"{folder}: its weights are sharded by ZeRO-3; load them with the trainer and save "
            "them with a lower stage"
        )
    ranks: dict[int, LayerTensors] = {}
    places = set()
    for path in layers or whole:
        match = (LAYER_FILE if layers else RANK_FILE).fullmatch(path.name)
        assert match is not None
        *numbers, rank = (int(number) for number in match.groups())
        content = load_torch(path)
        weights = content if layers else content.get("module")
        if not isinstance(weights, Mapping):
            raise UserError(f"{path}: holds no weights by name; copy the checkpoint again")
        prefix = "".join(f"{number}." for number in numbers)
        ranks.setdefault(rank, {}).update(tensors_in(weights, prefix))
        places.add((*numbers, rank))
    _check_places(folder, places)
    listed = tuple(ranks[rank] for rank in sorted(ranks))
    return RankTensors(listed, bool(layers), len(files_like(folder, STATES_FILE)))


def _check_places(folder: Path, places: set[tuple[int, ...]]) -> None:
    """Check that every layer has the files of all ranks."""
    degree = 1 + max(place[-1] for place in places)
    for layer in {place[:-1] for place in places}:
        for rank in range(degree):
            if (*layer, rank) not in places:
                prefix = (
                    f"layer_{layer[0]:02d}-model_{rank:02d}" if layer else f"mp_rank_{rank:02d}"
                )
                raise UserError(
                    f"{folder}: {prefix}{'-' if layer else '_'}model_states.pt is missing; copy "
                    "the checkpoint again"
                )


def rename(
    folder: Path, tensors: Mapping[str, StoredTensor], new_name: Callable[[str], str]
) -> LayerTensors:
    """Return tensors by other names.

    Raises:
        UserError: two have one name then.
    """
    renamed: LayerTensors = {}
    for name, tensor in tensors.items():
        new = new_name(name)
        if new in renamed:
            raise UserError(
                f"{folder}: {name} is a second {new}, which no family of this trainer has"
            )
        renamed[new] = tensor
    return renamed


def layer_numbers(folder: Path, names: Mapping[str, Any], inside: str) -> dict[str, int]:
    """Return the number of each file or module of a transformer layer → that of its layer.

    Args:
        names: that begin with the file's number.
        inside: a tensor that every transformer layer has, and no other one.

    Raises:
        UserError: a layer between two others is missing.
    """
    numbers = sorted(int(name.partition(".")[0]) for name in names if name.endswith(f".{inside}"))
    if not numbers:
        raise UserError(f"{folder}: no layer has {inside}; give a transformer's checkpoint")
    for number in range(numbers[0], numbers[-1]):
        if number not in numbers:
            raise UserError(
                f"{folder}: layer_{number:02d}-model_00-model_states.pt has no {inside}, or is "
                "missing; copy the checkpoint again"
            )
    return {str(number): layer for layer, number in enumerate(numbers)}


@dataclass(frozen=True)
class RankSum:
    """The sum of what each rank holds, or their mean.

    Copies that are equal are read as they are.
    """

    parts: Sequence[StoredTensor]
    is_mean: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def read(self, index: Index) -> Tensor:
        blocks = [part.read(index) for part in self.parts]
        if self.is_mean and all(torch.equal(blocks[0], block) for block in blocks):
            return blocks[0]
        total = torch.stack([block.float() for block in blocks]).sum(0)
        return (total / len(blocks) if self.is_mean else total).to(self.dtype)


Join = Callable[[str, Sequence[StoredTensor]], StoredTensor]


def join_all(folder: Path, ranks: Sequence[LayerTensors], join_tensor: Join) -> LayerTensors:
    """Return the whole tensors.

    Args:
        join_tensor: makes one of a name and its tensors of all ranks.

    Raises:
        UserError: a rank lacks a tensor that another has.
    """
    names = dict.fromkeys(name for rank in ranks for name in rank)
    for name in names:
        missing = [number for number, rank in enumerate(ranks) if name not in rank]
        if missing:
            raise UserError(
                f"{folder}: TP rank {missing[0]} has no tensor {name}, which another rank has; "
                "copy the checkpoint again"
            )
    return {name: join_tensor(name, [rank[name] for rank in ranks]) for name in names}
