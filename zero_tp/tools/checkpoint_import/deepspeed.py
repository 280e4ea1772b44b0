"""Checkpoints of DeepSpeed with a plain model of transformers: its own, and universal ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures.configs import CONFIG
from zero_tp.model.weights.load import open_config
from zero_tp.tools.checkpoint_import.deepspeed_states import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    TrainingState,
    open_states,
)
from zero_tp.tools.checkpoint_import.deepspeed_universal import is_universal, open_universal_states
from zero_tp.tools.checkpoint_import.native_names import (
    native_tensors,
    native_weights,
    obsolete_buffers,
)
from zero_tp.tools.checkpoint_import.source import Checkpoint


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder is one step of DeepSpeed's own checkpoints."""
    names = [path.name for path in folder.iterdir()]
    return not is_universal(folder) and any(
        pattern.fullmatch(name) for name in names for pattern in (MODEL_FILE, OPTIMIZER_FILE)
    )


def open_deepspeed(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> Checkpoint:
    """Open a step of DeepSpeed's own checkpoints.

    Raises:
        UserError: a file is missing or damaged; there is no config; a model-parallel run.
    """
    return checkpoint_of("deepspeed", folder, open_states(folder), config)


def open_universal(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> Checkpoint:
    """Open a folder of DeepSpeed's `ds_to_universal`, or of `zero-tp convert to-universal`."""
    return checkpoint_of("universal", folder, open_universal_states(folder), config)


def checkpoint_of(
    trainer: str, folder: Path, states: TrainingState, config: PretrainedConfig | None
) -> Checkpoint:
    """Return a checkpoint with the masters, and the frozen parameters and buffers beside them."""
    config = find_config(folder, states.saved) if config is None else config
    tensors = native_tensors({**states.others, **states.masters}, states.shared, config, folder)
    extra = sorted(
        name for name, value in states.saved["module"].items() if name.endswith("_extra_state")
    )
    left_out = [
        *([f"the optimizer's states ({', '.join(states.moments)})"] if states.moments else []),
        *([f"extra states ({len(extra)}, such as {extra[0]})"] if extra else []),
    ]
    return Checkpoint(
        trainer=trainer,
        folder=folder,
        config=config,
        tensors=tensors,
        weights=native_weights(config),
        left_out=tuple(left_out),
        ignorable=obsolete_buffers(config),
        notes=states.notes,
        dtype=torch.float32 if states.stage else None,
    )


def find_config(folder: Path, saved: Mapping[str, Any]) -> PretrainedConfig:
    """Return the config beside the checkpoint, or one that the client has saved in it.

    Raises:
        UserError: there is none.
    """
    for directory in (folder, folder.absolute().parent):
        if (directory / CONFIG).is_file():
            return open_config(directory)
    for value in saved.values():
        if isinstance(value, dict) and isinstance(value.get("model_type"), str):
            fields = dict(value)
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
    raise UserError(
        f"{folder}: DeepSpeed records no sizes of the model; give its {CONFIG} with --config"
    )
