"""The masters and moments in DeepSpeed's own checkpoints, by the names of the client's module.

A folder of one step, of a run with 2 replicas:

    stage 0    mp_rank_00_model_states.pt: weights, and the optimizer with its masters
    1, 2       the same, without an optimizer; [bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt
    3          zero_pp_rank_R_mp_rank_00_model_states.pt, whose weights are empty; the same
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_tp.base.errors import UserError, first_line
from zero_tp.parallel.spans import Index, Span, Spans
from zero_tp.tools.checkpoint_import.stored_tensors import (
    FileTensor,
    JoinedTensor,
    Piece,
    ReshapedTensor,
    StoredTensor,
    flatten,
    join,
    read_whole,
)
from zero_tp.tools.checkpoint_import.unpickling import InertObject, load_torch

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
EXPERT_FILE = "*expert*_model_states.pt"
OPTIMIZER = "optimizer_state_dict"
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INCOMPLETE = "copy the checkpoint again, with the files of all ranks"


@dataclass(frozen=True)
class Group:
    """A group of the optimizer: its settings, and the names of its parameters in order."""

    settings: Mapping[str, Any]
    names: tuple[str, ...]


@dataclass(frozen=True)
class TrainingState:
    """What one step's folder holds.

    Attributes:
        saved: content of the first file of the model: counts, the schedule, DeepSpeed's config.
        stage: of ZeRO.
        replicas: ranks that the masters were divided among.
        masters: fp32, of what is trained; at stage 0 the weights.
        others: frozen parameters and buffers.
        shared: second name of a tied tensor → its first.
        moments: kind → name → tensor; empty if they are not kept.
        problem: why they are not.
        groups: in the optimizer's order.
        steps: the optimizer's count of updates.
        loss_scale: fields of fp16's scaler.
        notes: lines for the user.
    """

    saved: Mapping[str, Any]
    stage: int
    replicas: int
    masters: Mapping[str, StoredTensor]
    others: Mapping[str, StoredTensor]
    shared: Mapping[str, str]
    moments: Mapping[str, Mapping[str, StoredTensor]] = field(default_factory=dict)
    problem: str = ""
    groups: tuple[Group, ...] = ()
    steps: int | None = None
    loss_scale: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Return the dtype of the weights: fp32, bf16 or fp16."""
        weights = self.saved["module"]
        first = next((weights[name] for name in self.masters if name in weights), None)
        return DTYPES.get(first.dtype, "fp32") if first is not None else "fp32"


def open_states(folder: Path) -> TrainingState:
    """Open the checkpoint of one step; no tensor is read.

    Raises:
        UserError: a file is missing or damaged; a model-parallel run or DeepSpeed's own experts.
    """
    with foreign_files_named(folder, "DeepSpeed 0.19.8"):
        return _open_states(folder)


@contextlib.contextmanager
def foreign_files_named(folder: Path, writer: str) -> Iterator[None]:
    """Raise a UserError for what reading a file of another version, with other keys, raises."""
    try:
        yield
    except UserError:
        raise  # which is a ValueError
    except (AssertionError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{folder}: not as {writer} writes it ({reason}); {INCOMPLETE}") from error


def _open_states(folder: Path) -> TrainingState:
    if any(folder.glob(EXPERT_FILE)):
        raise UserError(
            f"{folder}: has files of DeepSpeed's own experts, which no class of transformers has; "
            "save the model's state_dict with DeepSpeed"
        )
    models = rank_files(folder, MODEL_FILE)
    optimizers = rank_files(folder, OPTIMIZER_FILE)
    if 0 not in models:
        raise UserError(f"{folder}: no file of the first rank's model; {INCOMPLETE}")
    saved = load_saved(models[0])
    if saved.get("param_shapes") is None:
        return _unpartitioned(folder, saved)
    loaded = [_load_optimizer(optimizers[rank]) for rank in sorted(optimizers)]
    _check_complete(folder, optimizers, loaded)
    if "fp32_flat_groups" not in loaded[0]:
        return _partitioned_states(folder, saved, loaded)
    return _partitioned_parameters(folder, load_all(folder, models, saved, len(loaded)), loaded)


def rank_files(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return replica → file."""
    files = dict[int, Path]()
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match[2]):
            raise UserError(
                f"{path}: of a model-parallel rank, and a model of transformers has one; if it is "
                "Megatron-DeepSpeed's, give --format megatron-deepspeed"
            )
        files[int(match[1] or 0)] = path
    return files


def load_saved(path: Path) -> dict[str, Any]:
    """Return the content of a file of the model."""
    saved = load_torch(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("module"), dict):
        raise UserError(f"{path}: holds no model of DeepSpeed; {INCOMPLETE}")
    return saved


def load_all(
    folder: Path, models: Mapping[int, Path], first: dict[str, Any], ranks: int | None = None
) -> list[dict[str, Any]]:
    """Return the contents of all ranks' files of the model, or of the first if it has no pieces of
    frozen parameters.
    """
    if not first.get("frozen_param_shapes"):
        return [first]
    expected = int(first["dp_world_size"]) if ranks is None else ranks
    if sorted(models) != list(range(expected)):
        raise UserError(f"{folder}: {len(models)} of {expected} files of the model; {INCOMPLETE}")
    return [first, *(load_saved(models[rank]) for rank in range(1, expected))]


def _load_optimizer(path: Path) -> dict[str, Any]:
    content = load_torch(path)
    states = content.get(OPTIMIZER) if isinstance(content, dict) else None
    if not isinstance(states, dict):
        raise UserError(f"{path}: holds no states of an optimizer; {INCOMPLETE}")
    return states


def _check_complete(
    folder: Path, files: Mapping[int, Path], loaded: Sequence[Mapping[str, Any]]
) -> None:
    if not loaded:
        raise UserError(f"{folder}: has no *_optim_states.pt, which hold the weights; {INCOMPLETE}")
    count = loaded[0].get("partition_count", len(loaded))
    expected = max(count) if isinstance(count, (list, tuple)) else count
    missing = [rank for rank in range(expected) if rank not in files]
    if missing or len(files) != expected:
        what = f"no file of rank {missing[0]}" if missing else f"{len(files)} ranks' files"
        raise UserError(f"{folder}: {what} of {expected}; {INCOMPLETE}")


def _tensors(values: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: value for name, value in values.items() if isinstance(value, FileTensor)}


def _partitioned_states(
    folder: Path, saved: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]]
) -> TrainingState:
    """Open stage 1 or 2: a group's masters are one flat tensor, divided among the ranks.

    Of A (5 elements) and B (3):

        rank 0    A0 A1 A2 A3
        rank 1    A4 B0 B1 B2
    """
    shapes = saved["param_shapes"]
    key = "single_partition_of_fp32_groups"
    paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
    places = [_places(group, padding) for group, padding in zip(shapes, paddings, strict=True)]
    flats = [_join_flat([rank[key][index] for rank in ranks]) for index in range(len(shapes))]
    masters = _divide(folder, flats, places)
    base: Any = ranks[0].get("base_optimizer_state")
    problem = "" if isinstance(base, dict) else "elastic_checkpoint has moments of another form"
    moments = {}
    for kind in _kinds(base) if not problem else ():
        parts = [
            _join_flat([rank["base_optimizer_state"]["state"][index][kind] for rank in ranks])
            for index in range(len(shapes))
        ]
        moments[kind] = _divide(folder, parts, places)
    return TrainingState(
        saved,
        stage_of(ranks[0]),
        len(ranks),
        masters,
        untrained_of([saved], folder),
        dict(saved.get("shared_params") or {}),
        moments,
        problem,
        () if problem else groups_of(base["param_groups"], shapes),
        None if problem else steps_of(base["state"], base["param_groups"], folder),
        loss_scale_of(ranks[0]),
    )


def _partitioned_parameters(
    folder: Path, saved: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> TrainingState:
    """Open stage 3: each parameter is divided by itself, with garbage behind its last element.

    Of A (5 elements) and B (3):

        rank 0    A0 A1 A2 B0 B1
        rank 1    A3 A4 ?  B2 ?
    """
    shapes = [dict(group) for group in saved[0]["param_shapes"]]
    sizes = {name: shape for group in shapes for name, shape in group.items()}
    masters = _divide_separately(
        folder, [join([*map(flatten, rank["fp32_flat_groups"])]) for rank in ranks], sizes
    )
    base = ranks[0][OPTIMIZER]
    moments = {
        kind: _divide_separately(
            folder,
            [
                join(
                    [flatten(rank[OPTIMIZER]["state"][index][kind]) for index in range(len(shapes))]
                )
                for rank in ranks
            ],
            sizes,
        )
        for kind in _kinds(base)
    }
    return TrainingState(
        saved[0],
        3,
        len(ranks),
        masters,
        untrained_of(saved, folder),
        dict(saved[0].get("shared_params") or {}),
        moments,
        groups=groups_of(base["param_groups"], shapes),
        steps=steps_of(base["state"], base["param_groups"], folder),
        loss_scale=loss_scale_of(ranks[0]),
    )


def untrained_of(saved: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, StoredTensor]:
    """Return frozen parameters and buffers.

    Args:
        saved: contents of the files of the model: of all ranks if stage 3 has frozen parameters.
    """
    first = saved[0]
    module = _tensors(first["module"])
    trained = {name for group in first["param_shapes"] for name in group}
    trained |= (first.get("shared_params") or {}).keys()
    # Stage 1 records frozen parameters in the module alone, where those of stage 3 are empty.
    others = {
        name: tensor
        for name, tensor in module.items()
        if name not in trained and tensor.shape != (0,)
    }
    for name, shape in (first.get("frozen_param_shapes") or {}).items():
        pieces = [rank["frozen_param_fragments"][name] for rank in saved]
        whole = pieces[0].shape == tuple(shape) and len(pieces) == 1
        others |= (
            {name: pieces[0]}
            if whole
            else _divide_separately(folder, [*map(flatten, pieces)], {name: shape})
        )
    return others


def stage_of(rank: Mapping[str, Any]) -> int:
    """Return the stage of a file of states; BF16_Optimizer, of stage 1, records none."""
    stage = rank.get("zero_stage", 1)
    return int(stage.args[0]) if isinstance(stage, InertObject) else int(stage)


def _join_flat(parts: Sequence[StoredTensor]) -> StoredTensor:
    """Return a group's flat tensor; of a small group, the last ranks may have padding alone."""
    flats = [flatten(part) for part in parts]
    return join([flat for flat in flats if flat.shape[0]] or flats[:1])


def _places(
    shapes: Mapping[str, Any], paddings: Sequence[int]
) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return name → (first element in the flat tensor, shape)."""
    sizes = [
        math.prod(shape) + padding for shape, padding in zip(shapes.values(), paddings, strict=True)
    ]
    starts = [0, *itertools.accumulate(sizes)]
    return {
        name: (start, tuple(shape))
        for (name, shape), start in zip(shapes.items(), starts, strict=False)
    }


def _divide(
    folder: Path,
    flats: Sequence[StoredTensor],
    places: Sequence[Mapping[str, tuple[int, tuple[int, ...]]]],
) -> dict[str, StoredTensor]:
    """Return the parameters in flat tensors of groups."""
    tensors = dict[str, StoredTensor]()
    for flat, group in zip(flats, places, strict=True):
        for name, (start, shape) in group.items():
            if start + math.prod(shape) > flat.shape[0]:
                raise UserError(
                    f"{folder}: the ranks hold {flat.shape[0]} elements, and {name} ends at "
                    f"{start + math.prod(shape)}; {INCOMPLETE}"
                )
            tensors[name] = ReshapedTensor(flat, start, shape)
    return tensors


def _divide_separately(
    folder: Path, flats: Sequence[StoredTensor], shapes: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Return the parameters of which each rank has a piece, one after the other."""
    tensors = dict[str, StoredTensor]()
    offset = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        length = -(-numel // len(flats))
        short = next((flat for flat in flats if flat.shape[0] < offset + length), None)
        if short is not None:
            raise UserError(
                f"{folder}: a rank holds {short.shape[0]} elements, and its piece of {name} ends "
                f"at {offset + length}; {INCOMPLETE}"
            )
        pieces = tuple(
            # The span ends at the parameter's last element, before the garbage.
            Piece((Spans((Span.block(rank, length, numel, offset),), numel, flat.shape[0]),), flat)
            for rank, flat in enumerate(flats)
        )
        joined = JoinedTensor((numel,), flats[0].dtype, pieces)
        tensors[name] = ReshapedTensor(joined, 0, tuple(shape))
        offset += length
    return tensors


def _kinds(base: Any) -> tuple[str, ...]:
    """Return the names of the optimizer's states that have an element for each parameter's."""
    state: Mapping[str, Any] = next(iter(base["state"].values()), {})
    return tuple(
        name
        for name, value in state.items()
        if name != "step" and isinstance(value, FileTensor) and value.shape
    )


def groups_of(
    groups: Sequence[Mapping[str, Any]], flats: Sequence[Mapping[str, Any]]
) -> tuple[Group, ...]:
    """Return the optimizer's groups with the names of their parameters.

    Args:
        groups: whose `params` are numbers of flat tensors. Stage 3 has several for each group.
        flats: name → shape, of the parameters in each flat tensor.
    """
    return tuple(
        Group(
            {key: value for key, value in group.items() if key != "params"},
            tuple(name for index in group["params"] for name in flats[index]),
        )
        for group in groups
        if "params" in group  # which `to-universal` leaves to the client
    )


def steps_of(
    states: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], folder: Path
) -> int | None:
    """Return the count of updates, which a state or a group has; None without one."""
    # DeepSpeed's FusedAdam leaves a 0 in its groups.
    values = [state["step"] for state in states.values() if "step" in state] or [
        group["step"] for group in groups if "step" in group
    ]
    counts = {
        int(read_whole(value)) if isinstance(value, FileTensor) else int(value) for value in values
    }
    if len(counts) > 1:
        raise UserError(f"{folder}: its groups have been updated {sorted(counts)} times")
    return counts.pop() if counts else None


def loss_scale_of(rank: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a dynamic scaler; empty for a fixed one."""
    scaler = rank.get("loss_scaler")
    if not isinstance(scaler, InertObject):
        return {}
    names = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
    return {name: scaler.fields[name] for name in names if name in scaler.fields}


def _unpartitioned(folder: Path, saved: Mapping[str, Any]) -> TrainingState:
    """Open stage 0: weights in the training type and, in 16 bit, masters without names."""
    weights = _tensors(saved["module"])
    buffers = {name: weights[name] for name in saved.get("buffer_names") or () if name in weights}
    parameters = {name: weights[name] for name in weights if name not in buffers}
    problem = "stage 0 records no names of the optimizer's parameters"
    notes: tuple[str, ...] = ()
    masters = parameters
    if any(tensor.dtype != torch.float32 for tensor in parameters.values()):
        masters_in_order = _unnamed_masters(folder, parameters, saved.get("optimizer") or {})
        if masters_in_order is None:
            notes = (
                f"{folder}: without ZeRO, DeepSpeed records no names of masters of several groups: "
                "the weights are the rounded ones",
            )
        masters = masters_in_order or parameters
    return TrainingState(saved, 0, 1, masters, buffers, {}, problem=problem, notes=notes)


def _unnamed_masters(
    folder: Path, parameters: Mapping[str, StoredTensor], optimizer: Mapping[str, Any]
) -> dict[str, StoredTensor] | None:
    """Return the masters of one group that has all parameters in the model's order, else None."""
    groups: list[Any] = optimizer.get("fp32_groups_flat") or optimizer.get("fp32_groups") or []
    if len(groups) != 1:
        return None
    parts = groups[0] if isinstance(groups[0], (list, tuple)) else groups
    flat = join([flatten(part) for part in parts])
    sizes = [math.prod(tensor.shape) for tensor in parameters.values()]
    places = _places({name: tensor.shape for name, tensor in parameters.items()}, [0] * len(sizes))
    if sum(sizes) != flat.shape[0]:
        return None
    return {
        name: CheckedMaster(ReshapedTensor(flat, start, shape), parameters[name], folder)
        for name, (start, shape) in places.items()
    }


@dataclass(frozen=True)
class CheckedMaster:
    """A master whose place in a flat tensor is an assumption: rounded, it must be the weight."""

    master: StoredTensor
    weight: StoredTensor
    folder: Path

    @property
    def shape(self) -> tuple[int, ...]:
        return self.master.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.master.dtype

    def read(self, index: Index) -> Tensor:
        block = self.master.read(index)
        if not torch.equal(block.to(self.weight.dtype), self.weight.read(index)):
            raise UserError(
                f"{self.folder}: the masters are not in the model's order, and without ZeRO "
                "DeepSpeed records no names; save a checkpoint with stage 1, 2 or 3"
            )
        return block
