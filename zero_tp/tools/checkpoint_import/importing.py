"""Write a Hugging Face model from the checkpoint of another trainer, one parameter at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zero_tp.data.tokenizer_files import open_tokenizer
from zero_tp.model.architectures import weights_of
from zero_tp.model.weights.entries import native_entries
from zero_tp.model.weights.export import MAX_SHARD_SIZE, check_target, write_native
from zero_tp.tools.checkpoint_import.source import ParameterReader, SourceCheckpoint


@dataclass(frozen=True)
class ImportResult:
    """What was written.

    Attributes:
        parameters: numbers of the model.
        read: tensors of the source that were read.
        unused: those that `--ignore` or the format left out.
        tensors: number that were written.
        dtype: of the written weights.
        notes: lines for the user.
    """

    parameters: int
    read: int
    unused: int
    tensors: int
    dtype: torch.dtype
    notes: tuple[str, ...]


def stored_dtype(reader: ParameterReader) -> torch.dtype:
    """Return the dtype in which a checkpoint stores its largest tensor, the embedding or an MLP."""
    if reader.checkpoint.dtype is not None:
        return reader.checkpoint.dtype
    tensors = reader.checkpoint.tensors
    largest = max(reader.used, key=lambda name: (math.prod(tensors[name].shape), name))
    return tensors[largest].dtype


def import_checkpoint(
    checkpoint: SourceCheckpoint,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    ignored: Sequence[str] = (),
    max_shard_size: str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    proof: Callable[[Path], None] | None = None,
) -> ImportResult:
    """Write a Hugging Face model from the checkpoint of another trainer.

    Args:
        dtype: of the weights; by default what the source stores.
        tokenizer: directory to copy in.
        ignored: patterns of the source's tensors that may stay unused.
        proof: called with the written directory, before it is put in its place; raises UserError
            if the model is wrong.

    Raises:
        UserError: the output exists; a tensor is missing, unknown or of another shape.
    """
    check_target(output, overwrite)
    reader = ParameterReader(checkpoint, ignored)
    written = stored_dtype(reader) if dtype is None else dtype
    entries = native_entries(checkpoint.config, reader.shapes, reader.read, written)
    if tokenizer is not None:
        open_tokenizer(tokenizer)
    write_native(
        output,
        checkpoint.config,
        entries,
        tokenizer=tokenizer,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        check=proof,
    )
    weights = [weight for weight in weights_of(checkpoint.config) if weight.is_parameter]
    return ImportResult(
        parameters=sum(math.prod(reader.shapes[weight.our_name]) for weight in weights),
        read=len(reader.used),
        unused=len(checkpoint.tensors.keys() - reader.used),
        tensors=len(entries),
        dtype=written,
        notes=(*checkpoint.notes, *reader.notes, *(_rounded(reader, written) if not dtype else ())),
    )


def _rounded(reader: ParameterReader, written: torch.dtype) -> list[str]:
    """Return a line on tensors that are stored in a wider dtype than they are written in."""
    tensors = reader.checkpoint.tensors
    wider = sorted(
        name for name in reader.used if torch.promote_types(tensors[name].dtype, written) != written
    )
    if not wider:
        return []
    stored = str(tensors[wider[0]].dtype).removeprefix("torch.")
    return [
        f"{len(wider)} tensors are rounded, such as {wider[0]}, stored in {stored}; --dtype fp32 "
        "does not"
    ]
