"""Describe a checkpoint by its manifest and its files' sizes; only `--verify` reads the files."""

from __future__ import annotations

import math
from pathlib import Path

from zero_tp.base.errors import UserError, one_line
from zero_tp.run.checkpoint.directory import (
    check_content,
    check_sizes,
    complete_steps,
    incomplete_after,
)
from zero_tp.run.checkpoint.find import find_checkpoint
from zero_tp.run.checkpoint.manifest import Parallelism

SIZES = (
    *("n_layer", "n_embd", "n_head", "n_positions"),
    *(
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
    ),
    *("max_position_embeddings", "vocab_size"),
)


def inspect(source: Path, *, verify: bool = False) -> str:
    """Describe `source`, a run (its newest checkpoint) or a checkpoint, as a table.

    Args:
        verify: also compare every file's checksum, and refuse a run with a newer directory that is
            no checkpoint.
    """
    checkpoint = find_checkpoint(source)
    manifest = checkpoint.manifest
    steps = complete_steps(source)
    parent = manifest.parent
    imported = manifest.imported
    # A script that verifies a run must not take the newest complete checkpoint for the newest one.
    incomplete = incomplete_after(source, manifest.step)
    if verify and incomplete:
        raise UserError(incomplete[-1])
    # A checkpoint may have hundreds of GB. A stat of each file finds cut and missing ones at once.
    check = check_content if verify else check_sizes
    check(checkpoint.path, manifest.files)
    model = manifest.model
    files = manifest.files
    rows = [
        ("checkpoint", str(checkpoint.path)),
        *([("complete", "steps " + ", ".join(f"{step:,}" for step in steps))] if steps else []),
        ("step", f"{manifest.step:,}"),
        *([("stage", manifest.stage)] if manifest.stage is not None else []),
        *([("tokens", f"{manifest.tokens:,}")] if manifest.tokens is not None else []),
        ("saved at", str(Parallelism.from_manifest(manifest))),
        *(
            [("parent", f"{parent.checkpoint}, trained on {parent.tokens:,} tokens")]
            if parent
            else []
        ),
        *([("imported", f"{imported.trainer}, {imported.checkpoint}")] if imported else []),
        (
            "model",
            f"{model['model_type']}: "
            + ", ".join(f"{name} {model[name]:,}" for name in SIZES if name in model),
        ),
        (
            "parameters",
            f"{sum(math.prod(entry.shape) for entry in manifest.parameters.values()):,}",
        ),
        ("states", ", ".join(manifest.kinds)),
        *([("average", f"of the weights, decay {manifest.ema:g}")] if manifest.ema else []),
        ("tokenizer", manifest.tokenizer or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
        ("files", f"{len(files)}, {_size(sum(file.bytes for file in files.values()))}"),
        *(("", f"{name}  {_size(file.bytes)}") for name, file in sorted(files.items())),
        *(("skipped", line) for line in incomplete),
        *(("note", line) for line in checkpoint.notes if line not in incomplete),
        *([("verified", "every checksum OK")] if verify else []),
    ]
    return "\n".join(f"{name:<11} {one_line(text)}" for name, text in rows)


def _size(count: int) -> str:
    """Write bytes in MB or GB, powers of ten."""
    return f"{count / 1e9:,.3f} GB" if count >= 1e9 else f"{count / 1e6:,.3f} MB"
