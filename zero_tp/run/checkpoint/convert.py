"""Export a checkpoint to a native Hugging Face directory.

It runs in one process without DeepSpeed, and holds one parameter in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig

from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.data.tokenizer_fingerprint import TokenizerFingerprint
from zero_tp.model.architectures import architecture_of, weights_of
from zero_tp.model.weights.export import MAX_SHARD_SIZE, check_target, native_entries, write_native
from zero_tp.run.checkpoint.directory import check_content
from zero_tp.run.checkpoint.find import RunCheckpoint, find_checkpoint
from zero_tp.run.checkpoint.reader import CheckpointReader
from zero_tp.run.checkpoint.run_tokenizer import (
    check_run_tokenizer,
    find_run_tokenizer,
    uncompared_tokenizer,
)


@dataclass(frozen=True)
class ExportResult:
    """The result of an export.

    Attributes:
        tokenizer: the directory that was copied, or None.
        causal: whether the model is a causal language model.
        notes: see `RunCheckpoint` and `uncompared_tokenizer`.
    """

    checkpoint: Path
    parameters: int
    tokenizer: Path | None
    causal: bool
    notes: tuple[str, ...] = ()


def to_huggingface(
    source: Path,
    output: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    card: Callable[[RunCheckpoint], str] | None = None,
) -> ExportResult:
    """Export the fp32 masters of `source`, a run or a checkpoint, to a Hugging Face model.

    Args:
        tokenizer: directory to copy in; by default the run's.
        card: returns the model card of a checkpoint (zero_tp/tools/report/card.py); by default
            none.
    """
    checkpoint = find_checkpoint(source)
    manifest = checkpoint.manifest
    tokenizer = find_run_tokenizer(tokenizer, checkpoint)
    fingerprint = manifest.tokenizer_fingerprint
    config = checkpoint.hf_config()
    check_target(output, overwrite)  # before a long read
    if tokenizer is not None:
        opened = open_tokenizer(tokenizer)
        check_run_tokenizer(opened, tokenizer, checkpoint)
        fingerprint = fingerprint or TokenizerFingerprint.of(opened)
    # An export of damaged weights would look like a model that has learned badly.
    check_content(checkpoint.path, manifest.files)
    reader = CheckpointReader(checkpoint.path, manifest)
    shapes = {name: parameter.shape for name, parameter in reader.parameters.items()}
    # Entries hold functions, not tensors: each parameter is read when its turn to be written comes.
    entries = native_entries(config, shapes, reader.whole, dtype)
    write_native(
        output,
        config,
        entries,
        generation=GenerationConfig(**manifest.generation)
        if manifest.generation is not None
        else None,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        card=card(checkpoint) if card is not None else None,
    )
    weights = [weight for weight in weights_of(config) if weight.is_parameter]
    parameters = sum(math.prod(shapes[weight.our_name]) for weight in weights)
    causal = architecture_of(config).spec(config).causal
    notes = checkpoint.notes + uncompared_tokenizer(tokenizer, checkpoint)
    return ExportResult(checkpoint.path, parameters, tokenizer, causal, notes)
