"""Checkpoints of DeepSpeed with a plain model of transformers: its own, and universal ones."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.model.architectures import aliases_of
from zero_tp.model.architectures.configs import CONFIG
from zero_tp.model.weights.native import open_config
from zero_tp.tools.checkpoint_import.deepspeed_states import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    TrainingState,
    open_states,
)
from zero_tp.tools.checkpoint_import.deepspeed_universal import (
    MOMENTS,
    is_universal,
    open_universal_states,
)
from zero_tp.tools.checkpoint_import.native_names import (
    common_prefix,
    native_tensors,
    native_weights,
    obsolete_buffers,
)
from zero_tp.tools.checkpoint_import.source import SourceCheckpoint, SourceStates

ONE_STEP_AHEAD = ("LRRangeTest", "OneCycle")
"""Schedules of DeepSpeed whose rate at an iteration is that of the next one."""


def is_deepspeed(folder: Path) -> bool:
    """Return whether a folder is one step of DeepSpeed's own checkpoints."""
    names = [path.name for path in folder.iterdir()]
    return not is_universal(folder) and any(
        pattern.fullmatch(name) for name in names for pattern in (MODEL_FILE, OPTIMIZER_FILE)
    )


def open_deepspeed(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a step of DeepSpeed's own checkpoints.

    Raises:
        UserError: a file is missing or damaged; there is no config; a model-parallel run.
    """
    return checkpoint_of("deepspeed", folder, open_states(folder), config)


def open_universal(
    folder: Path, config: PretrainedConfig | None, vocabulary: int | None
) -> SourceCheckpoint:
    """Open a folder of DeepSpeed's `ds_to_universal`, or of `zero-tp convert to-universal`."""
    return checkpoint_of("universal", folder, open_universal_states(folder), config)


def checkpoint_of(
    trainer: str, folder: Path, states: TrainingState, config: PretrainedConfig | None
) -> SourceCheckpoint:
    """Return a checkpoint with the masters, and the frozen parameters and buffers beside them."""
    config = find_config(folder, states.saved) if config is None else config
    named = {**states.others, **states.masters}
    tensors = native_tensors(named, states.shared, config, folder)
    prefix = common_prefix(named, config)
    problem = states.problem or _states_problem(states)
    extra = sorted(
        name for name, value in states.saved["module"].items() if name.endswith("_extra_state")
    )
    left_out = [
        *([f"the optimizer's states ({', '.join(states.moments)})"] if states.moments else []),
        *([f"extra states ({len(extra)}, such as {extra[0]})"] if extra else []),
    ]
    return SourceCheckpoint(
        trainer=trainer,
        folder=folder,
        config=config,
        tensors=tensors,
        weights=native_weights(config),
        left_out=tuple(left_out),
        ignorable=obsolete_buffers(config),
        notes=states.notes,
        dtype=torch.float32 if states.stage else None,
        states=None if problem else _states(states, prefix, config, folder),
        states_problem=problem,
    )


def _states_problem(states: TrainingState) -> str:
    """Return why the optimizer's states are no plain Adam's; "" if they are."""
    kinds = ", ".join(states.moments) or "none"
    if tuple(states.moments) != MOMENTS:
        return f"only exp_avg and exp_avg_sq of Adam are kept, and the states are {kinds}"
    settings = [group.settings for group in states.groups]
    if not settings or not all(
        {"betas", "eps", "weight_decay", "lr"} <= group.keys() for group in settings
    ):
        return "the optimizer's groups lack betas, eps, weight_decay or lr"
    if any(
        (group["betas"], group["eps"]) != (settings[0]["betas"], settings[0]["eps"])
        for group in settings
    ):
        return "the optimizer's groups have different betas or eps"
    if not all(group.get("bias_correction", True) for group in settings):
        return "the optimizer has no bias correction"
    return "" if states.steps is not None else "the optimizer has no count of updates"


def _states(
    states: TrainingState, prefix: str, config: PretrainedConfig, folder: Path
) -> SourceStates:
    """Return Adam's states under the names of transformers' class."""
    saved = states.saved
    buffers = {*(saved.get("buffer_names") or ())}
    counters = {
        "global_steps": int(saved["global_steps"]),
        "global_samples": int(saved.get("global_samples") or 0),
        "skipped_steps": int(saved.get("skipped_steps") or 0),
    }
    assert states.steps is not None
    # A tied weight may have been trained under the name of the alias.
    usual = {first: second for second, first in states.shared.items()}
    aliases = {*map(prefix.__add__, aliases_of(config))}
    return SourceStates(
        moments={
            kind: native_tensors(tensors, states.shared, config, folder)
            for kind, tensors in states.moments.items()
        },
        groups=[
            (
                group.settings,
                [
                    (usual.get(name, name) if name in aliases else name).removeprefix(prefix)
                    for name in group.names
                ],
            )
            for group in states.groups
        ],
        frozen=tuple(name.removeprefix(prefix) for name in states.others if name not in buffers),
        decoupled=_is_decoupled(states),
        steps=states.steps,
        counters=counters,
        loss_scale=states.loss_scale,
        schedule_start=_schedule_start(saved, counters, folder),
        zero_stage=states.stage,
        dtype=states.dtype,
    )


def _is_decoupled(states: TrainingState) -> bool | None:
    """Return whether the optimizer is AdamW; None if neither its groups nor the config tell."""
    optimizer = (states.saved.get("ds_config") or {}).get("optimizer") or {}
    kind = str(optimizer.get("type", "")).lower()
    if kind in ("adam", "adamw"):
        return kind == "adamw" or bool((optimizer.get("params") or {}).get("adam_w_mode", True))
    decoupled = states.groups[0].settings.get("decoupled_weight_decay")
    return None if decoupled is None else bool(decoupled)


def _schedule_start(
    saved: Mapping[str, Any], counters: Mapping[str, int], folder: Path
) -> int | None:
    """Return the number of updates before step 1 of a run's schedule that continues this one.

    The next rate of a warm-up after 10 updates, by iterations of DeepSpeed's schedule and here:

        DeepSpeed    iteration 9 of -1, 0, 1, …
        here         step 9 of 1, 2, …, so the schedule starts after 2 updates
    """
    schedule = saved.get("lr_scheduler")
    if not isinstance(schedule, dict):
        return None
    updates = counters["global_steps"] - counters["skipped_steps"]
    if "last_batch_iteration" in schedule:
        block = (saved.get("ds_config") or {}).get("scheduler") or {}
        position = int(schedule["last_batch_iteration"]) + (block.get("type") in ONE_STEP_AHEAD)
    elif "last_epoch" in schedule:
        position = int(schedule["last_epoch"])
    else:
        return None
    # The next step gets the schedule's value at `position`.
    start = updates + 1 - position
    if not 0 <= start <= updates:
        raise UserError(
            f"{folder}: its schedule is at {position} after {updates} updates, which no run of one "
            "schedule reaches; take another step"
        )
    return start


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
