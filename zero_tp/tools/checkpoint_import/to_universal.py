"""`zero-tp convert to-universal`: a checkpoint that DeepSpeed 0.19.8 loads at stages 1 and 2 with
`"checkpoint": {"load_universal": true}`, for transformers' class of the model.

    DIR/latest_universal                             the folder's name
    DIR/global_stepN/mp_rank_00_model_states.pt      counts, schedule, shapes; no weights
    DIR/global_stepN/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
    DIR/global_stepN/zero/optimizer_state.pt         the next rate, fp16's loss scale

NAME is the parameter's in the class. Groups have the next rate alone, because DeepSpeed copies
whatever else they have into the client's groups by their number.

Stage 3 looks for another file of the model and finds none: 0.19.8 would give all groups of torch's
Adam one tensor as their count of updates, which then advances once for each group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.base.files import partial_directory, put_in_place
from zero_tp.engine.zero.states import MASTER
from zero_tp.model.architectures import Weight, aliases_of, to_hf
from zero_tp.model.weights.native import native_model
from zero_tp.run.checkpoint.directory import check_content
from zero_tp.run.checkpoint.find import RunCheckpoint, find_checkpoint
from zero_tp.run.checkpoint.manifest import Manifest
from zero_tp.run.checkpoint.reader import CheckpointReader
from zero_tp.tools.checkpoint_import.deepspeed import ONE_STEP_AHEAD
from zero_tp.tools.checkpoint_import.deepspeed_universal import MASTER as MASTER_FILE
from zero_tp.tools.checkpoint_import.deepspeed_universal import MOMENTS, STATES
from zero_tp.tools.checkpoint_import.native_names import native_weights

FILES = {MASTER: MASTER_FILE, **{kind: kind for kind in MOMENTS}}
VERSION = "0.19.8"
MOST_GROUPS = 256
"""DeepSpeed loads only as many groups as are recorded, and leaves the others without a word."""


def convert_to_universal(source: Path, output: Path) -> list[str]:
    """Write a run's checkpoint for DeepSpeed; return lines on the result.

    Raises:
        UserError: the output exists; the optimizer is no Adam; its groups have different rates; the
            model has buffers, which DeepSpeed would not load.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"{output}: exists already; give another --output")
    checkpoint = find_checkpoint(source)
    config = checkpoint.hf_config()
    weights = [weight.native for weight in native_weights(config) if weight.native is not None]
    rate = _check(checkpoint, weights)
    check_content(checkpoint.path, checkpoint.manifest.files)
    folder = f"global_step{checkpoint.step}"
    with partial_directory(output) as temporary:
        shapes = _write_parameters(temporary / folder / "zero", checkpoint, weights, config)
        _write_states(temporary / folder, checkpoint.manifest, shapes, rate)
        (temporary / "latest_universal").write_text(folder, encoding="utf-8")
        put_in_place(temporary, output)
    return [
        f"{checkpoint.path} → {output / folder} ({len(shapes)} parameters: masters, moments, "
        f"{checkpoint.manifest.progress.optimizer_steps} updates)",
        *checkpoint.notes,
        f'next: engine.load_checkpoint("{output}") of DeepSpeed {VERSION} with '
        '"checkpoint": {"load_universal": true} and ZeRO-1 or 2; decay, betas and groups are its '
        "own config's",
    ]


def _check(checkpoint: RunCheckpoint, weights: list[Weight]) -> float:
    """Check that DeepSpeed can continue the run; return the next rate."""
    manifest = checkpoint.manifest
    states = [kind for kind in manifest.kinds if kind not in (MASTER, "ema")]
    if sorted(states) != sorted(MOMENTS) or manifest.progress.optimizer_steps is None:
        raise UserError(
            f"{checkpoint.path}: has {', '.join(states) or 'no states'}, and only Adam's moments "
            "are written; export the weights with to-hf"
        )
    buffers = [weight.names[0] for weight in weights if not weight.is_parameter]
    if buffers:
        raise UserError(
            f"{checkpoint.path}: the model has the buffer {buffers[0]}, and DeepSpeed loads no "
            "buffers from universal checkpoints; export the weights with to-hf"
        )
    if manifest.imported is not None:
        raise UserError(
            f"{checkpoint.path}: no run has continued it yet; {manifest.imported.checkpoint} is "
            "what it was converted from"
        )
    rates = set(manifest.progress.learning_rates)
    if len(rates) != 1:
        raise UserError(
            f"{checkpoint.path}: its groups have {len(rates)} learning rates, and DeepSpeed's "
            "groups are the client's; use one lr_scale for all, or export the weights with to-hf"
        )
    return rates.pop()


def _write_parameters(
    zero: Path, checkpoint: RunCheckpoint, weights: list[Weight], config: PretrainedConfig
) -> dict[str, torch.Size]:
    """Write the files of each parameter; return their shapes by the class's names."""
    reader = CheckpointReader(checkpoint.path, checkpoint.manifest)
    steps = torch.tensor(float(checkpoint.manifest.progress.optimizer_steps or 0))
    usual = _own_names(config)
    shapes = dict[str, torch.Size]()
    for group in _by_tensor(weights):
        for kind, file in FILES.items():
            for native, tensor in to_hf(group, partial(reader.whole, kind=kind)).items():
                name = usual.get(native, native)
                folder = zero / name
                folder.mkdir(parents=True, exist_ok=True)
                torch.save({"param": tensor.contiguous().clone()}, folder / f"{file}.pt")
                shapes[name] = tensor.shape
                if kind == MASTER:
                    torch.save(steps, folder / "step.pt")
    return shapes


def _by_tensor(weights: list[Weight]) -> Iterator[list[Weight]]:
    """Yield the weights that share tensors of the class, such as Q, K and V of a fused one."""
    groups: dict[tuple[str, ...], list[Weight]] = {}
    for weight in weights:
        groups.setdefault(weight.names, []).append(weight)
    yield from groups.values()


def _own_names(config: PretrainedConfig) -> dict[str, str]:
    """Return a tied weight's usual name → the one under which the class lists it first."""
    listed = [name for name, _ in native_model(config).named_parameters()]
    return {
        source: alias
        for alias, source in aliases_of(config).items()
        if alias in listed and source not in listed
    }


def _write_states(
    folder: Path, manifest: Manifest, shapes: Mapping[str, torch.Size], rate: float
) -> None:
    """Write what DeepSpeed reads beside the parameters."""
    states: dict[str, Any] = {
        "param_groups": [{"lr": rate} for _ in range(MOST_GROUPS)],
        "ds_version": VERSION,
        **_loss_scale(manifest),
    }
    torch.save(states, folder / "zero" / STATES)
    saved = {
        "module": {},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [dict(shapes)],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": _schedule(manifest),
        **manifest.progress.counters,
        "dp_world_size": manifest.data,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": VERSION,
    }
    torch.save(saved, folder / "mp_rank_00_model_states.pt")


def _schedule(manifest: Manifest) -> dict[str, Any] | None:
    """Return the state of the schedule from which DeepSpeed's next step leads to our next rate.

    Until then DeepSpeed keeps the rate of its groups. After 10 updates, WarmupLR:

        step 11    the groups' rate, ours at 11
        step 12    DeepSpeed's iteration 12, ours at 12
    """
    block = manifest.config.get("scheduler")
    if not block:
        return None
    counters = manifest.progress.counters
    updates = counters["global_steps"] - counters["skipped_steps"]
    step = max(0, updates - manifest.progress.schedule_start) + 1
    if "last_epoch" in (manifest.progress.schedule or {}):
        return {"last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}
    return {"last_batch_iteration": step - (block["type"] in ONE_STEP_AHEAD)}


def _loss_scale(manifest: Manifest) -> dict[str, Any]:
    """Return fp16's scaler, if it is dynamic."""
    saved = manifest.progress.loss_scale
    if saved.get("last_overflow_iter") is None:
        return {}
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    fp16 = manifest.config["fp16"]
    scaler = DynamicLossScaler(
        init_scale=saved["cur_scale"],
        scale_window=fp16.get("loss_scale_window", 1000),
        min_scale=fp16.get("min_loss_scale", 1),
        delayed_shift=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=True,
        dtype=torch.half,
    )
    for name, value in saved.items():
        setattr(scaler, name, value)
    return {"loss_scaler": scaler, "dynamic_loss_scale": True}
