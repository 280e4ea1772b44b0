"""Write the model card of an exported model: which run trained it, and how."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from zero_tp.base.constants import STAGES_KEY
from zero_tp.base.errors import UserError
from zero_tp.run.checkpoint.find import RunCheckpoint
from zero_tp.run.checkpoint.manifest import Manifest, Parallelism
from zero_tp.tools.report.runs import read_runs

LOSSES = {"loss": "loss", "validation_loss": "validation loss"}


def model_card(checkpoint: RunCheckpoint, weights: str = "") -> str:
    """Return the card of a model exported from a checkpoint, from the manifest and the run's
    metrics.

    Cards are public, so only the last two parts of the paths of corpora and of the parent are
    shown.

    Args:
        weights: which average the weights are; "": those of the checkpoint's step.
    """
    manifest = checkpoint.manifest
    task = "fill-mask" if manifest.generation is None else "text-generation"
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=["zero_tp"])
    # RUN/checkpoints/step_00000500: the run is two levels up.
    run = checkpoint.path.resolve().parent.parent
    # The run has logged them for its own weights.
    losses = "losses before averaging" if weights else "losses"
    facts = _facts(manifest) | {"weights": weights, losses: _losses(run, manifest.step)}
    facts["libraries"] = ", ".join(
        f"{name} {version}" for name, version in manifest.versions.items()
    )
    rows = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items() if fact)
    table = f"| | |\n| --- | --- |\n{rows}\n"
    return (
        f"---\n{data.to_yaml()}\n---\n\n# {run.name}\n\nTrained and exported by zero_tp.\n\n{table}"
    )


def _format_corpora(weights: list[tuple[str, float]]) -> str:
    return ", ".join(f"{_shorten(name)} (weight {weight:g})" for name, weight in weights)


def _facts(manifest: Manifest) -> dict[str, str]:
    """Format the manifest's training settings.

    A missing one is "", as in a Trainer's checkpoint.
    """
    fixed = manifest.fixed
    step = manifest.step
    parent = manifest.parent
    parameters = sum(math.prod(entry.shape) for entry in manifest.parameters.values())
    trained = f"{step:,} steps"
    if {"train_batch_size", "zero_tp.data.sequence_length"} <= fixed.keys():
        batch = fixed["train_batch_size"]
        length = fixed["zero_tp.data.sequence_length"]
        size = "" if manifest.tokens is not None else f" of {batch:,} × {length:,} tokens"
        trained += f"{size}: {manifest.trained_tokens:,} tokens"
    optimizer = fixed.get("optimizer", {})
    return {
        "architecture": f"`{manifest.model['model_type']}`, {parameters:,} parameters",
        "trained": trained,
        "started from": ""
        if parent is None
        else f"{_shorten(parent.checkpoint)}, {parent.tokens:,} tokens before",
        "objective": _format_settings(fixed.get("zero_tp.objective", {})),
        "corpora": ""
        if manifest.stage is not None
        else _format_corpora(fixed.get("zero_tp.data.train", [])),
        **{
            f"stage {stage['name']}": f"{min(stage['steps'], step + 1 - stage['first_step']):,} "
            f"steps of {stage['train_batch_size']:,} × {stage['sequence_length']:,} tokens of "
            f"{_format_corpora(stage['data'])}"
            for key, stage in fixed.items()
            if key.startswith(STAGES_KEY) and stage["first_step"] <= step
        },
        "optimizer": f"{optimizer.get('type', '')} "
        f"{_format_settings(optimizer.get('params', {}))}".strip(),
        "seed": str(fixed.get("zero_tp.training.seed", "")),
        "ranks": str(Parallelism.from_manifest(manifest)),
    }


def _shorten(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _format_settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _losses(run: Path, step: int) -> str:
    """Return the last losses up to this step.

    They are "" if the run's metrics are gone, because an export needs none.
    """
    try:
        (metrics,) = read_runs([run])
    except UserError:
        return ""
    losses = []
    for name, label in LOSSES.items():
        # The run may have continued after this checkpoint.
        logged = [pair for pair in metrics.series.get(name, {}).items() if pair[0] <= step]
        losses += [f"{label} {value:.4f} at step {last_step:,}" for last_step, value in logged[-1:]]
    return ", ".join(losses)
