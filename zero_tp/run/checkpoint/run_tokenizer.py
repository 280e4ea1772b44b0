"""Find the tokenizer of a checkpoint's run, and compare tokenizers with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.weight_files import resolve_tokenizer
from zero_tp.run.checkpoint.find import RunCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEDY = "give the tokenizer that the model was trained with: --tokenizer DIR"


def find_run_tokenizer(requested: Path | None, checkpoint: RunCheckpoint) -> Path | None:
    """Return the directory of the requested tokenizer, else of the run's, else None."""
    relative = checkpoint.manifest.tokenizer_from_run
    run = checkpoint.path.absolute().parent.parent
    # Tried if the recorded path is gone: run and tokenizer may have been moved together.
    moved = None if relative is None else run / relative
    return resolve_tokenizer(requested, checkpoint.manifest.tokenizer, moved)


def check_run_tokenizer(
    tokenizer: PreTrainedTokenizerBase, directory: Path, checkpoint: RunCheckpoint
) -> None:
    """Check that a tokenizer gives the ids that the model was trained on.

    Without a recorded fingerprint there is nothing to compare.

    Args:
        directory: of the tokenizer.
    """
    fingerprint = checkpoint.manifest.tokenizer_fingerprint
    if fingerprint is not None:
        name = f"the tokenizer {directory}"
        owner = f"the one that {checkpoint.path} was trained with"
        fingerprint.check(tokenizer, name, owner, REMEDY)


def uncompared_tokenizer(directory: Path | None, checkpoint: RunCheckpoint) -> tuple[str, ...]:
    """Return a line if a tokenizer cannot be compared.

    An older version saved the checkpoint, without a fingerprint.
    """
    manifest = checkpoint.manifest
    if None in (directory, manifest.tokenizer) or manifest.tokenizer_fingerprint is not None:
        return ()
    line = f"{checkpoint.path} has no fingerprint of its tokenizer"
    return (f"{line}, so {directory} was not compared with it",)
