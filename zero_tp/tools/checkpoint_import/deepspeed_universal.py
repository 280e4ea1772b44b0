"""Folders of DeepSpeed's `ds_to_universal`: a file for each master and moment.

    zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt    from stages 1 and 2: {"param": whole tensor}
    zero/NAME/step.pt                               from stages 1 and 2
    zero/optimizer_state.pt                         groups; of stage 3 all states of rank 0
    [zero_pp_rank_R_]mp_rank_00_model_states.pt     copied: shapes, shared and frozen parameters

From stage 3 the tensors are flat, and frozen parameters and buffers have no folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import.deepspeed_states import (
    INCOMPLETE,
    MODEL_FILE,
    OPTIMIZER,
    TrainingState,
    foreign_files_named,
    groups_of,
    load_all,
    load_saved,
    loss_scale_of,
    rank_files,
    stage_of,
    steps_of,
    untrained_of,
)
from zero_tp.tools.checkpoint_import.stored_tensors import (
    FileTensor,
    ReshapedTensor,
    StoredTensor,
    flatten,
)
from zero_tp.tools.checkpoint_import.unpickling import load_torch

STATES = "optimizer_state.pt"
MASTER = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")


def is_universal(folder: Path) -> bool:
    """Return whether a folder is one step of universal checkpoints."""
    return (folder / "zero").is_dir()


def open_universal_states(folder: Path) -> TrainingState:
    """Open a universal checkpoint; no tensor is read.

    Raises:
        UserError: a file is missing or damaged, or a tensor has another size than was recorded.
    """
    with foreign_files_named(folder, "ds_to_universal of DeepSpeed 0.19.8"):
        return _open(folder)


def _open(folder: Path) -> TrainingState:
    models = rank_files(folder, MODEL_FILE)
    if 0 not in models:
        raise UserError(
            f"{folder}: no *_model_states.pt, which ds_to_universal copies; {INCOMPLETE}"
        )
    saved = load_saved(models[0])
    zero = folder / "zero"
    states = load_torch(zero / STATES)
    shapes = {
        name: tuple(shape) for group in saved["param_shapes"] for name, shape in group.items()
    }
    masters = {name: _state(zero / name, MASTER, shape) for name, shape in shapes.items()}
    moments = {
        kind: {name: _state(zero / name, kind, shape) for name, shape in shapes.items()}
        for kind in MOMENTS
        if any((zero / name / f"{kind}.pt").is_file() for name in shapes)
    }
    stage = stage_of(states)
    groups = states["param_groups"]
    return TrainingState(
        saved,
        stage,
        1,
        masters,
        untrained_of(load_all(folder, models, saved) if stage == 3 else [saved], folder),
        dict(saved.get("shared_params") or {}),
        moments,
        groups=groups_of(groups, saved["param_shapes"]),
        steps=steps_of(_states(zero, shapes, states), groups, folder),
        loss_scale=loss_scale_of(states),
    )


def _states(zero: Path, names: Iterable[str], states: Mapping[str, Any]) -> dict[Any, Any]:
    """Return what may have the count of updates: a file of each parameter, or rank 0's states."""
    files = {name: zero / name / "step.pt" for name in names}
    counts = {name: {"step": load_torch(file)} for name, file in files.items() if file.is_file()}
    return counts or states.get(OPTIMIZER, {}).get("state", {})


def _state(folder: Path, kind: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return the whole master or moment of a parameter."""
    path = folder / f"{kind}.pt"
    content = load_torch(path)
    tensor = content["param"] if isinstance(content, dict) else content
    if not isinstance(tensor, FileTensor) or math.prod(tensor.shape) != math.prod(shape):
        size = tuple(tensor.shape) if isinstance(tensor, FileTensor) else type(tensor).__name__
        raise UserError(f"{path}: holds {size}, and the model's file says {shape}; {INCOMPLETE}")
    return ReshapedTensor(flatten(tensor), 0, shape)
