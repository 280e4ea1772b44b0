"""A run's directory belongs to one run at a time, and says what that run's start was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_tp.checkpoint.directory import checkpoints_of, complete_steps, find_checkpoint, read_manifest, step_directory
from zero_tp.checkpoint.manifest import Manifest
from zero_tp.errors import UserError
from zero_tp.files import InvalidJson, lock, read_object, sync, write_atomically

CONFIG, LOCK, PROCESS = "config.json", ".lock", "rank0.pid"


def saved_start(run: Path, given: Path | None = None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (resolved config of the start, the model's config) of what would be resumed; None when nothing can be.

    The first stands in the checkpoint, and for those that were saved before it did in the run's own file.

    Args:
        given: a checkpoint or run to resume from, instead of this run's newest checkpoint that can be read.

    Raises:
        UserError: the file can't be read, or is not a JSON object.
    """
    manifest = _newest_manifest(run, given)
    model = None if manifest is None else manifest.model
    if manifest is not None and manifest.config is not None:
        return manifest.config, model
    path = run / CONFIG
    if not path.exists() or not complete_steps(run):
        return None, model
    try:
        return read_object(path), model
    except (InvalidJson, OSError) as error:
        raise UserError(f"{path}: not a run's config ({error}); give another --output-dir") from error


def _newest_manifest(run: Path, given: Path | None) -> Manifest | None:
    with contextlib.suppress(UserError):  # told when the run is resumed
        if given is not None:
            return read_manifest(find_checkpoint(given))
    for step in reversed(complete_steps(run)):
        with contextlib.suppress(UserError):  # the same
            return read_manifest(step_directory(run, step))
    return None


@contextlib.contextmanager
def run_directory(run: Path) -> Iterator[list[str]]:
    """Make a run's directory and hold it while the block runs; `rank0.pid` there names this process, for signals.

    One rank enters it, before any is connected. It gives lines for a person: that the file system knows no locks.

    Raises:
        UserError: it is a file, nothing can be written there, or another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            checkpoints_of(run).mkdir(parents=True, exist_ok=True)
            locked = lock(held.enter_context((run / LOCK).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            (run / PROCESS).write_text(f"{os.getpid()}\n")
            held.callback((run / PROCESS).unlink, missing_ok=True)
        except BlockingIOError:
            raise UserError(f"{run}: another run is writing there; wait for it, or give another --output-dir") from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield [] if locked else [f"{run}: its file system has no locks: see that no other run writes there"]


def write_config(run: Path, resolved: dict[str, Any]) -> None:
    """Replace the run's config at once; it is on the disk then.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_atomically(run / CONFIG, json.dumps(resolved, indent=2) + "\n")
        sync(run, below=False)
    except OSError as error:
        raise UserError(f"{run / CONFIG}: cannot be written ({error.strerror}); make room for it") from error
