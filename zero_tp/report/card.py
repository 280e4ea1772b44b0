"""A model card tells, beside an exported model, which run made it and how."""

from __future__ import annotations

import math
from pathlib import Path

from huggingface_hub import ModelCardData

from zero_tp.checkpoint.manifest import Manifest, Parallelism
from zero_tp.errors import UserError
from zero_tp.report.runs import read_runs

LOSSES = {"loss": "loss", "validation_loss": "validation loss"}


def model_card(checkpoint: Path, manifest: Manifest) -> str:
    """Return the card of a model that is exported from a checkpoint, by its manifest and its run's metrics.

    Corpora and the parent are named by the last parts of their paths: a card is for others to read.
    """
    task = "fill-mask" if manifest.generation is None else "text-generation"
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=["zero_tp"])
    rows = "\n".join(f"| {name} | {told} |" for name, told in facts(checkpoint, manifest).items() if told)
    title = checkpoint.resolve().parent.parent.name
    table = f"| | |\n| --- | --- |\n{rows}\n"
    return f"---\n{data.to_yaml()}\n---\n\n# {title}\n\nTrained and exported by zero_tp.\n\n{table}"


def facts(checkpoint: Path, manifest: Manifest) -> dict[str, str]:
    """Return what a card says of a checkpoint; "" where nothing is known, as of one that Trainer saved."""
    fixed, step, parent = manifest.fixed, manifest.step, manifest.parent
    parameters = sum(math.prod(entry.shape) for entry in manifest.parameters.values())
    trained = f"{step:,} steps"
    if {"train_batch_size", "zero_tp.data.sequence_length"} <= fixed.keys():
        batch, length = fixed["train_batch_size"], fixed["zero_tp.data.sequence_length"]
        trained += f" of {batch:,} × {length:,} tokens: {step * batch * length:,} tokens"
    optimizer = fixed.get("optimizer", {})
    return {
        "architecture": f"`{manifest.model['model_type']}`, {parameters:,} parameters",
        "trained": trained,
        "started from": "" if parent is None else f"{_short(parent.checkpoint)}, {parent.tokens:,} tokens before",
        "objective": _settings(fixed.get("zero_tp.objective", {})),
        "corpora": ", ".join(f"{_short(name)} (weight {part:g})" for name, part in fixed.get("zero_tp.data.train", [])),
        "optimizer": " ".join([*filter(None, [optimizer.get("type")]), _settings(optimizer.get("params", {}))]).strip(),
        "seed": str(fixed.get("zero_tp.training.seed", "")),
        "ranks": str(Parallelism.saved(manifest)),
        "losses": _losses(checkpoint, step),
        "libraries": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
    }


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _settings(given: dict[str, object]) -> str:
    return ", ".join(f"{key} {value}" for key, value in given.items())


def _losses(checkpoint: Path, step: int) -> str:
    """Return the last losses up to this step; "" where the run's metrics are not there."""
    try:
        (run,) = read_runs([checkpoint.resolve().parent.parent])
    except UserError:  # an export needs none
        return ""
    found = []
    for name, told in LOSSES.items():
        series = run.get(name)
        before = [pair for pair in zip(series.steps, series.values, strict=True) if pair[0] <= step]
        found += [f"{told} {value:.4f} at step {at:,}" for at, value in before[-1:]]
    return ", ".join(found)
