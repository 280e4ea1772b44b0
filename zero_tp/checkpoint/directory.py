"""A run's directory: its config, and its `checkpoints/`: what is complete, what is newest, what goes.

A checkpoint is complete or it isn't there: ranks write into a temporary directory, which is renamed once its manifest
is written; `latest` is replaced after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_tp.errors import UserError

CONFIG, LOCK = "config.json", ".lock"
MANIFEST, LATEST, TEMPORARY = "manifest.json", "latest", ".writing"
FORMAT = 1
_STEP = re.compile(r"step_(\d{8,})")


def first_config(run: Path) -> dict[str, Any] | None:
    """The resolved config that the run in this directory was started with; None when there is nothing to resume.

    Raises:
        UserError: the file can't be read, or is not a JSON object.
    """
    path = run / CONFIG
    if not path.exists() or not complete_steps(run):
        return None
    try:
        resolved = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: not valid JSON ({error}); give another --output-dir") from error
    if not isinstance(resolved, dict):
        raise UserError(f"{path}: not a run's config; give another --output-dir")
    return resolved


@contextlib.contextmanager
def run_directory(run: Path) -> Iterator[None]:
    """Make a run's directory and hold it while the block runs. One rank enters it, before any is connected.

    Raises:
        UserError: it is a file, nothing can be written there, or another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            checkpoints_of(run).mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((run / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run}: another run is writing there; wait for it, or give another --output-dir") from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield


def write_config(run: Path, resolved: dict[str, Any]) -> None:
    """Replace the run's config at once."""
    temporary = run / (CONFIG + ".new")
    temporary.write_text(json.dumps(resolved, indent=2) + "\n")
    os.replace(temporary, run / CONFIG)


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def step_directory(run: Path, step: int) -> Path:
    return checkpoints_of(run) / f"step_{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    found = []
    for path in checkpoints_of(run).glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The manifest, its files' presence and sizes checked.

    Raises:
        UserError: it is not a checkpoint, of another format, or a file is missing or has another size.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: not a checkpoint (no {MANIFEST})") from None
    except (ValueError, OSError) as error:
        raise UserError(
            f"{path}: not valid JSON ({error}); the checkpoint is damaged: remove {checkpoint} to use the one before"
        ) from error
    if not isinstance(manifest, dict):
        raise UserError(f"{path}: not a manifest; the checkpoint is damaged: remove {checkpoint} to use the one before")
    if manifest.get("format") != FORMAT:
        raise UserError(f"{path}: format {manifest.get('format')}, this version reads {FORMAT}")
    for name, size in manifest["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise UserError(f"{file}: {state}; the checkpoint is damaged: remove {checkpoint} to use the one before")
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sizes(directory: Path) -> dict[str, int]:
    """Relative path → bytes of every file below."""
    return {str(p.relative_to(directory)): p.stat().st_size for p in sorted(directory.rglob("*")) if p.is_file()}


def begin(run: Path) -> Path:
    """A fresh temporary directory for the ranks to write into; leftovers of a killed save go. One rank calls it."""
    temporary = checkpoints_of(run) / TEMPORARY
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(run: Path, temporary: Path, step: int, manifest: dict[str, Any]) -> Path:
    """Give the written files their name. One rank calls it, when all have written."""
    manifest = {"format": FORMAT, "step": step, **manifest, "files": file_sizes(temporary)}
    for name in manifest["files"]:
        _sync(temporary / name)
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(temporary / MANIFEST)
    _sync(temporary)
    final = step_directory(run, step)
    if final.exists():
        _remove(final)
    os.replace(temporary, final)
    latest = checkpoints_of(run) / (LATEST + ".new")
    latest.write_text(final.name + "\n")
    _sync(latest)
    os.replace(latest, checkpoints_of(run) / LATEST)
    _sync(checkpoints_of(run))
    return final


def _remove(checkpoint: Path) -> None:
    """The manifest goes first: what a kill leaves of the rest does not count as complete."""
    with contextlib.suppress(FileNotFoundError):
        (checkpoint / MANIFEST).unlink()
    shutil.rmtree(checkpoint)


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for step in complete_steps(run)[:-keep]:
        _remove(step_directory(run, step))


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a person means: the directory itself, or the newest of a run.

    Raises:
        UserError: neither a run nor a checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path
    steps = complete_steps(path)
    if not steps:
        raise UserError(f"{path}: no complete checkpoint there; give a run directory or RUN/checkpoints/step_N")
    return step_directory(path, steps[-1])
