"""A run's directory: its lock, its owner, its config, and what would be resumed from it."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_tp.checkpoint.directory import checkpoints_of, complete_steps, find_checkpoint, read_manifest, step_directory
from zero_tp.checkpoint.manifest import Manifest
from zero_tp.checkpoint.owner import RunOwner
from zero_tp.errors import UserError
from zero_tp.files import lock, sync, write_atomically

CONFIG, LOCK, PROCESS = "config.json", ".lock", "rank0.pid"


def saved_start(run: Path, given: Path | None = None) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return (resolved config of the start, the model's config) of what would be resumed; None for a new run.

    Args:
        given: a checkpoint or run to resume from, instead of this run's newest checkpoint that can be read.
    """
    manifest = _newest_manifest(run, given)
    return (None, None) if manifest is None else (manifest.config, copy.deepcopy(manifest.model))


def _newest_manifest(run: Path, given: Path | None) -> Manifest | None:
    with contextlib.suppress(UserError):  # told when the run is resumed
        if given is not None:
            return read_manifest(find_checkpoint(given))
    for step in reversed(complete_steps(run)):
        with contextlib.suppress(UserError):  # the same
            return read_manifest(step_directory(run, step))
    return None


@contextlib.contextmanager
def run_directory(run: Path) -> Iterator[RunOwner]:
    """Make a run's directory and own it while the block runs; `rank0.pid` there names this process, for signals.

    Rank 0 enters it, before any rank is connected.

    Raises:
        UserError: it is a file, nothing can be written there, or another run of this machine holds it.
    """
    with contextlib.ExitStack() as stack:
        try:
            checkpoints_of(run).mkdir(parents=True, exist_ok=True)
            lock(stack.enter_context((run / LOCK).open("w")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            owner = RunOwner(run)
            # By a new file: this machine may still see one that another has removed, which it could not open.
            write_atomically(run / PROCESS, f"{os.getpid()}\n")
            stack.callback((run / PROCESS).unlink, missing_ok=True)
        except BlockingIOError:
            raise UserError(f"{run}: another run is writing there; wait for it, or give another --output-dir") from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield owner


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
