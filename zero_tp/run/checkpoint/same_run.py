"""Compare a checkpoint with the run that opens it: the settings that no resume may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zero_tp.base.constants import MODEL_KEY, PARAM_GROUPS_KEY, RAMP_KEY, STAGES_KEY
from zero_tp.base.errors import UserError, shown
from zero_tp.base.settings.optimizer import IMPLEMENTATION
from zero_tp.base.settings.removed import drop_removed_keys
from zero_tp.base.versions import versions
from zero_tp.run.checkpoint.manifest import Manifest
from zero_tp.run.config.stages import fixed_stages

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig

PARALLELISM_KEYS = ("zero_tp.parallel", "zero_optimization.stage", "bf16.enabled", "fp16.enabled")
"""Keys of a config that `Parallelism` covers."""

STAGE_SETTINGS = {
    "sequence_length": "zero_tp.data.sequence_length",
    "train_batch_size": "train_batch_size",
}
UNSTAGED: dict[str, Any] = {
    "batch_size_rampup": None,
    "rope": {},
    "scheduler": None,
    "lr_scale": 1.0,
}
"""What the only stage of a run without stages has: a setting of the whole run, or none."""


def stage_entries(config: RunConfig, step: int) -> dict[str, Any]:
    """Return a manifest's entries on its stage; none if all steps have the same batch."""
    training = config.zero_tp.training
    if not training.stages and training.batch_size_rampup is None:
        return {}
    stage = config.stages[config.timeline.step_samples(step).stage].name
    return {
        **({"stage": stage} if stage else {}),
        "tokens": config.timeline.step_samples(step + 1).tokens_before,
    }


def fixed_settings(
    config: RunConfig, names: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the keys of a config that no resume may change.

    Args:
        names: of corpora that have moved: the prefix now → the one before.
    """
    block = config.zero_tp
    ramp = block.training.batch_size_rampup
    optimizer = config.settings.written()["optimizer"]
    params = optimizer["params"]
    return {
        "zero_tp.model": {key: block.model[key] for key in sorted(block.model)},
        "zero_tp.training.seed": block.training.seed,
        # A list, because the order of the corpora decides which samples a step sees.
        "zero_tp.data.train": [
            [names.get(prefix, prefix), weight] for prefix, weight in block.data.train.items()
        ],
        "zero_tp.data.sequence_length": block.data.sequence_length,
        "zero_tp.data.document_attention": block.data.document_attention,
        "train_batch_size": config.global_batch,
        # The optimizer's implementation may change, like offload.
        "optimizer": {
            **optimizer,
            "params": {key: params[key] for key in params if key not in IMPLEMENTATION},
        },
        # By number, so that a difference is named with its entry.
        PARAM_GROUPS_KEY: {
            str(index): group.model_dump(exclude_none=True)
            for index, group in enumerate(block.param_groups)
        },
        **({} if block.masked is None else {"zero_tp.objective": block.masked.model_dump()}),
        RAMP_KEY: None if ramp is None else ramp.model_dump(),
        **fixed_stages(config.stages, config.timeline, names),
    }


def differences(
    manifest: Manifest, config: RunConfig, validation: dict[str, dict[str, Any]]
) -> list[str]:
    """Return a line on each difference between a checkpoint and the run that opens it.

    Compared are config keys, versions of libraries and validation corpora.

    Keys of `Parallelism` are omitted: `describe_parent` and the line "resuming step …" show them.

    Args:
        validation: identities of the validation corpora by prefix.
    """
    saved = f"when step {manifest.step} was saved"
    # A corpus that validation had then and lacks now is no line here: the key of its list has one.
    changed = [
        prefix for prefix, old in manifest.validation.items() if validation.get(prefix, old) != old
    ]
    # Keys that this version no longer has would show as "not set".
    config_before, _ = drop_removed_keys(manifest.config)
    before = {
        **config_before,
        **{f"{name}'s version": version for name, version in manifest.versions.items()},
    }
    now = {
        **config.resolved(),
        **{f"{name}'s version": version for name, version in versions().items()},
    }
    return [
        *(f"{key}: {value}, was {old} {saved}" for key, value, old in _differing("", now, before)),
        *(
            f"zero_tp.data.validation: {prefix} holds other documents or tokens than {saved}"
            for prefix in changed
        ),
    ]


def _differing(path: str, now: Any, before: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value now, value before) of each difference, at the deepest key that has one."""
    if path in PARALLELISM_KEYS:
        return
    if isinstance(now, dict) and isinstance(before, dict):
        # Not a set, whose order of strings differs between two starts.
        for key in (*before, *(key for key in now if key not in before)):
            yield from _differing(f"{path}.{key}" if path else key, now.get(key), before.get(key))
    elif now != before:
        yield (
            path,
            "not set" if now is None else shown(now),
            "not set" if before is None else shown(before),
        )


def check_same_run(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that a run of this config can resume from the checkpoint.

    Corpora may have moved; `RunInputs.check_resumed` compares their content.
    """
    check_states(checkpoint, manifest, config)
    if manifest.imported is not None:
        return  # `check_imported` compares what another trainer records
    check_saved_by_run(checkpoint, manifest)
    # Corpora may have moved: only their number, order and weights are compared.
    trained = config.trained_corpora(manifest.step)
    names = dict(zip(trained, manifest.corpora, strict=False))
    now_fixed, moved_fixed = (
        _trained(fixed_settings(config, moved), manifest.step) for moved in ({}, names)
    )
    fixed = _fixed_before(manifest, now_fixed)
    for key in dict.fromkeys((*now_fixed, *(key for key in fixed if key.startswith(STAGES_KEY)))):
        if key not in fixed and not key.startswith(STAGES_KEY):
            raise UserError(
                f"{checkpoint}: its manifest lacks fixed.{key}; the checkpoint is damaged"
            )
        value, before = now_fixed.get(key), fixed.get(key)
        if before not in (value, moved_fixed.get(key)):
            # `_differing` finds nothing if a key of the model is null in one and absent in the
            # other.
            key, now, old = next(_differing(key, value, before), (key, shown(value), shown(before)))
            raise UserError(
                f"{key}: {now}, but the run of {checkpoint} was started with {old}; "
                f"set it back, or start a new run from these weights with --from {checkpoint} and "
                "another --output-dir"
            )


def _trained(fixed: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the settings of `fixed_settings` without stages that begin after `step`.

    Such a stage may still change, and others may follow it.
    """
    return {
        key: value
        for key, value in fixed.items()
        if not (key.startswith(STAGES_KEY) and value["first_step"] > step)
    }


def _fixed_before(manifest: Manifest, now: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with, as `fixed_settings` has them.

    Args:
        now: those of the run that opens it.
    """
    # Checkpoints of earlier versions lack the first two.
    fixed = _trained({PARAM_GROUPS_KEY: {}, RAMP_KEY: None, **manifest.fixed}, manifest.step)
    first = f"{STAGES_KEY}[0]"
    if first in now and first not in fixed:
        # A run without stages has been one, to which others are added now.
        fixed[first] = {
            **now[first],
            "data": fixed.get("zero_tp.data.train"),
            **{name: fixed.get(key) for name, key in STAGE_SETTINGS.items()},
            **UNSTAGED,
        }
    return fixed


def check_saved_by_run(checkpoint: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint of a Trainer, or of another trainer.

    Its manifest lacks the optimizer and the batch size, which a run compares.
    """
    if manifest.imported is not None:
        raise UserError(
            f"{checkpoint}: converted from {manifest.imported.trainer}, and no run has continued "
            "it yet; give its run as --output-dir"
        )
    if "optimizer" not in manifest.fixed:
        raise UserError(
            f"{checkpoint}: saved by a Trainer, without optimizer and batch in its manifest; "
            "export it, and start from "
            f"the weights with {MODEL_KEY}.from_pretrained"
        )


def check_states(checkpoint: Path, manifest: Manifest, config: RunConfig) -> None:
    """Check that the optimizer's states were saved and can be restored. SGD may have no states."""
    if "offload_optimizer" in config.nvme_paths:
        raise UserError(
            "zero_optimization.offload_optimizer.device: a run cannot be resumed or started from a "
            "checkpoint with its "
            'optimizer on NVMe, where DeepSpeed does not restore its states; use "cpu"'
        )
    # Only the master was saved. SGD without momentum has no states, and no count of steps either.
    if len(manifest.kinds) == 1 and manifest.progress.optimizer_steps is not None:
        raise UserError(
            f"{checkpoint}: saved with the optimizer on NVMe, without its states, so it cannot be "
            "resumed; export it "
            "with zero-tp convert to-hf, or give another --output-dir"
        )
