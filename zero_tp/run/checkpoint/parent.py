"""The parent of a new run.

That is the checkpoint of another run that it starts from (`start_point.Branch`).

Here it is checked against the new run's config, model and tokenizer, and described for the log.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.base.constants import MODEL_KEY, PARAM_GROUPS_KEY
from zero_tp.base.errors import ConfigError, UserError, shown
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.model.architectures.configs import TOKEN_IDS, fields_of
from zero_tp.model.architectures.rotary import ROPE
from zero_tp.run.checkpoint.find import RunCheckpoint
from zero_tp.run.checkpoint.manifest import Manifest, Parallelism, Parent
from zero_tp.run.checkpoint.same_run import (
    check_saved_by_run,
    check_states,
    differences,
    fixed_settings,
)
from zero_tp.run.config import RunConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# They change no weight, only which tokens a token sees.
WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
SAMPLE_ORDER = ("training.seed", "data.sequence_length")
"""With the corpora and their weights, these keys decide the order of the samples."""
MAX_CHANGE_LINES = 5
"""Most lines that a new run prints on differences from its parent."""
INHERITED = "kept: weights, moments, the optimizer's count of updates, and in fp16 the loss scale"
ONLY_WEIGHTS = "kept: weights alone, because this optimizer has other states than the parent's"
RESTARTED = "restarted: the schedule, the samples and dropout, from step 1"


def check_parent(
    parent: RunCheckpoint,
    config: RunConfig,
    model: PretrainedConfig,
    fingerprint: TokenizerFingerprint | None = None,
) -> tuple[str, ...]:
    """Check that a new run can start from a checkpoint; return notes. No communication.

    Args:
        model: config of the new run's model.
        fingerprint: of the new run's tokenizer, or of its corpora's.
    """
    check_states(parent.path, parent.manifest, config)
    notes = _check_tokenizer(parent.path, parent.manifest, fingerprint)
    check_model(parent.path, parent.manifest, model, "--from allows")
    check_saved_by_run(parent.path, parent.manifest)
    return notes


def _check_tokenizer(
    checkpoint: Path, manifest: Manifest, fingerprint: TokenizerFingerprint | None
) -> tuple[str, ...]:
    """Check that both runs' tokenizers give the same ids; return a note.

    The weights were trained on the ids of the parent's.
    """
    if fingerprint is None:
        return ()
    saved = manifest.tokenizer_fingerprint
    if saved is None:
        return (
            f"{checkpoint} has no fingerprint of its tokenizer, so the data's tokenizer was not "
            "compared with it",
        )
    remedy = "prepare the data with the tokenizer of the checkpoint"
    remedy += f", --tokenizer {manifest.tokenizer}" if manifest.tokenizer is not None else ""
    fingerprint.require_same(
        saved, "the data's tokenizer", f"the one of --from {checkpoint}", remedy
    )
    return ()


def check_model(
    checkpoint: Path,
    manifest: Manifest,
    model: PretrainedConfig,
    allows: str,
    *,
    has_rope: bool = True,
) -> None:
    """Check that the fields that differ do not change what a weight means.

    Args:
        allows: begins the remedy.
        has_rope: rope and windows may differ, too.
    """
    saved = manifest.model
    fields = fields_of(model.model_type)
    rotary = has_rope and "rope_parameters" in fields.names()
    may_differ = {
        *fields.dropouts,
        *fields.irrelevant,
        *TOKEN_IDS,
        *ROPE,
        *WINDOWS,
        "initializer_range",
    }
    if not has_rope:
        # Newer configs have all that rope needs in this field; older names are copies of it.
        may_differ -= {"rope_parameters", *WINDOWS}
    # With learned positions this number is the number of rows of a weight.
    may_differ |= {"max_position_embeddings"} if rotary else set()
    # The fields that the class declares. The JSON file has more, such as transformers' version,
    # which change no weight.
    names = ("model_type", *inspect.get_annotations(type(model)), *fields.undeclared)
    for name in names:
        value = getattr(model, name, None)
        before = saved.get(name)
        if name not in may_differ and value != before:
            allowed = [
                "dropout",
                *(["rope", "max_position_embeddings", "windows"] if rotary else []),
            ]
            problem = f"{shown(value)}, but the model of {checkpoint} has {shown(before)}"
            raise ConfigError(
                f"{MODEL_KEY}.{name}", problem, f"{allows} changes of {', '.join(allowed)}"
            )


def inherits_states(manifest: Manifest, config: RunConfig) -> bool:
    """Return whether the new optimizer has the states that were saved; else a run inherits the
    weights alone. Hyperparameters may differ.
    """
    return _states_of(manifest.fixed) == _states_of(fixed_settings(config))


def _states_of(fixed: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what decides which states each parameter has."""
    optimizer = fixed["optimizer"]
    # Adam and AdamW have the same two moments, and differ only in how they apply decay.
    name = str(optimizer["type"]).lower().replace("adamw", "adam")
    if name == "muon":
        groups = fixed.get(PARAM_GROUPS_KEY, {}).values()
        keys = ("kind", "pattern", "optimizer")
        return name, [[group.get(key) for key in keys] for group in groups]
    # AMSGrad has a third state, the largest second moment.
    return name, bool(optimizer.get("params", {}).get("amsgrad"))


def check_child(source: Path, run: Path, manifest: Manifest) -> None:
    """Check that a run that resumes with `--from source` was started from that source."""
    if manifest.parent is None:
        raise UserError(
            f"--from {source}: {run} is already at step {manifest.step} and was not started from "
            "it; give another "
            "--output-dir to start a new run"
        )
    checkpoint = Path(manifest.parent.checkpoint)
    requested = source.resolve()
    # `--from` may name the checkpoint or its run, RUN/checkpoints/step_N.
    if requested not in (checkpoint, checkpoint.parent.parent):
        raise UserError(
            f"--from {source}: {run} was started from {checkpoint}; give another --output-dir to "
            "start a new run"
        )


def describe_parent(
    parent: RunCheckpoint,
    config: RunConfig,
    corpora: Mapping[str, Any],
    validation: dict[str, dict[str, Any]],
) -> list[str]:
    """Return lines on what a run inherits from its parent, and on each config key that differs.

    Args:
        corpora, validation: of the new run, by prefix.
    """
    checkpoint = parent.path
    manifest = parent.manifest
    before = Parallelism.from_manifest(manifest)
    now = Parallelism.of(config)
    tokens = Parent.of(checkpoint, manifest).tokens
    moved = "" if before == now else f", saved at {before} → {now}"
    lines = [
        f"started from {checkpoint}, {tokens:,} tokens{moved}",
        *parent.notes,
        INHERITED if inherits_states(manifest, config) else ONLY_WEIGHTS,
        RESTARTED,
    ]
    lines += _shorten(differences(manifest, config, validation))
    block = config.zero_tp
    fixed = manifest.fixed
    weights = [weight for _, weight in fixed.get("zero_tp.data.train", [])]
    order_before = (
        list(manifest.corpora.values()),
        weights,
        *(fixed.get(f"zero_tp.{key}") for key in SAMPLE_ORDER),
    )
    order_now = (
        list(corpora.values()),
        [*block.data.train.values()],
        block.training.seed,
        block.data.sequence_length,
    )
    if order_before == order_now:
        lines.append(
            "the parent's samples repeat in the same order; another zero_tp.training.seed changes "
            "it"
        )
    return lines


def _shorten(changes: list[str]) -> list[str]:
    """Return at most `MAX_CHANGE_LINES` lines.

    The last one names the keys of the changes that it replaces.
    """
    if len(changes) <= MAX_CHANGE_LINES:
        return changes
    others = ", ".join(change.partition(": ")[0] for change in changes[MAX_CHANGE_LINES - 1 :])
    return [
        *changes[: MAX_CHANGE_LINES - 1],
        f"also changed (config.json of both runs has the values): {others}",
    ]
