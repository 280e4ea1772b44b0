"""Find the tokenizer of a checkpoint's run, and check that a tokenizer is the one that its model was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from zero_tp.base.weight_files import resolve_tokenizer
from zero_tp.run.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEDY = "give the tokenizer that the model was trained with: --tokenizer DIR"


def find_run_tokenizer(requested: Path | None, checkpoint: Path, manifest: Manifest) -> Path | None:
    """Return the directory of the requested tokenizer, else of the run's, else None."""
    relative = manifest.tokenizer_from_run
    moved = None if relative is None else checkpoint.absolute().parent.parent / relative
    return resolve_tokenizer(requested, manifest.tokenizer, moved)


def check_run_tokenizer(
    tokenizer: PreTrainedTokenizerBase, directory: Path, checkpoint: Path, manifest: Manifest
) -> None:
    """Check that a tokenizer gives the ids that the model was trained on, if the checkpoint records them.

    Args:
        directory: of the tokenizer.
    """
    if manifest.tokenizer_fingerprint is not None:
        manifest.tokenizer_fingerprint.check(
            tokenizer, f"the tokenizer {directory}", f"the one that {checkpoint} was trained with", REMEDY
        )


def uncompared_tokenizer(directory: Path | None, checkpoint: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return a line if a tokenizer cannot be compared, because an older version saved the checkpoint."""
    if None in (directory, manifest.tokenizer) or manifest.tokenizer_fingerprint is not None:
        return ()
    return (f"{checkpoint} has no fingerprint of its tokenizer, so {directory} was not compared with it",)
