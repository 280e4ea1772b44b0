"""A run's directory holds its config and its `checkpoints/`.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.errors import UserError
from zero_tp.files import InvalidJson, read_object, write_atomically

if TYPE_CHECKING:
    from zero_tp.tensors.files import Written

CONFIG, LOCK, PROCESS = "config.json", ".lock", "rank0.pid"
MANIFEST, LATEST, TEMPORARY = "manifest.json", "latest", ".writing"
FORMAT = 3
_STEP = re.compile(r"step_(\d{8,})")


class Damaged(UserError):
    """A file of a checkpoint is not as it was written.

    Attributes:
        file: which one; `checkpoint`: the directory of the checkpoint.
    """

    def __init__(self, file: Path, problem: str):
        super().__init__(f"{file}: {problem}; the checkpoint is damaged: use another one")
        self.file, self.problem, self.checkpoint = file, problem, file.parent


def first_config(run: Path) -> dict[str, Any] | None:
    """Return the resolved config that the run in this directory was started with; None when nothing can be resumed.

    Raises:
        UserError: the file can't be read, or is not a JSON object.
    """
    path = run / CONFIG
    if not path.exists() or not complete_steps(run):
        return None
    try:
        return read_object(path)
    except (InvalidJson, OSError) as error:
        raise UserError(f"{path}: not a run's config ({error}); give another --output-dir") from error


def saved_model(run: Path) -> dict[str, Any] | None:
    """Return the model's config in the newest checkpoint here that can be read; None when there is none."""
    for step in reversed(complete_steps(run)):
        with contextlib.suppress(UserError):  # told when the run is resumed
            model: dict[str, Any] = read_manifest(step_directory(run, step))["model"]
            return model
    return None


@contextlib.contextmanager
def run_directory(run: Path) -> Iterator[None]:
    """Make a run's directory and hold it while the block runs; `rank0.pid` there names this process, for signals.

    One rank enters it, before any is connected.

    Raises:
        UserError: it is a file, nothing can be written there, or another run holds it.
    """
    with contextlib.ExitStack() as held:
        try:
            checkpoints_of(run).mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((run / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (run / PROCESS).write_text(f"{os.getpid()}\n")
            held.callback((run / PROCESS).unlink, missing_ok=True)
        except BlockingIOError:
            raise UserError(f"{run}: another run is writing there; wait for it, or give another --output-dir") from None
        except OSError as error:
            raise UserError(
                f"{run}: cannot be a run's directory ({error.strerror}); give another --output-dir"
            ) from error
        yield


def write_config(run: Path, resolved: dict[str, Any]) -> None:
    """Replace the run's config at once."""
    write_atomically(run / CONFIG, json.dumps(resolved, indent=2) + "\n")


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def step_directory(run: Path, step: int) -> Path:
    return checkpoints_of(run) / f"step_{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending."""
    found = []
    for path in checkpoints_of(run).glob("step_*"):
        match = _STEP.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append(int(match[1]))
    return sorted(found)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return the manifest, after a check that its files are there and as long as it says.

    Raises:
        Damaged: a file is missing or has another size, or the manifest can't be read.
        UserError: it is not a checkpoint, or of another format.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = read_object(path)
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: not a checkpoint (no {MANIFEST})") from None
    except (InvalidJson, OSError) as error:
        raise Damaged(path, str(error)) from error
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {manifest.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    for name, written in manifest["files"].items():
        file = checkpoint / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            raise Damaged(file, "is missing")
        if found != written["bytes"]:
            raise Damaged(file, f"has {found} bytes, not {written['bytes']}")
    return manifest


def check_file(file: Path, manifested: dict[str, Any], read: Callable[[], Written] | None = None) -> None:
    """Check that a file has the SHA-256 that the manifest says.

    Args:
        read: gives what was found, where it isn't read here.

    Raises:
        Damaged: it has another one, or cannot be read.
    """
    from zero_tp.tensors.files import read_hashed

    try:
        found = read() if read else read_hashed(file)
    except OSError as error:
        raise Damaged(file, f"cannot be read ({error.strerror})") from error
    if found.sha256 != manifested["sha256"]:
        raise Damaged(file, f"SHA-256 is {found.sha256[:12]}…, not {manifested['sha256'][:12]}…")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin(run: Path) -> Path:
    """Make a fresh temporary directory for the ranks to write into; what a killed save left goes. One rank calls it."""
    temporary = checkpoints_of(run) / TEMPORARY
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def commit(run: Path, temporary: Path, step: int, manifest: dict[str, Any], files: dict[str, Written]) -> Path:
    """Give the written files their name. One rank calls it, when all have written.

    Args:
        files: every file that the ranks wrote and flushed.

    Raises:
        RuntimeError: a file is not there as it was written.
        OSError: the disk is full or gone.
    """
    for name, written in files.items():
        path = temporary / name
        if not path.is_file() or path.stat().st_size != written.size:
            raise RuntimeError(f"{path}: not there as its rank wrote it; is the run directory shared by all nodes?")
    listed = {name: {"bytes": written.size, "sha256": written.sha256} for name, written in files.items()}
    text = json.dumps({"format": FORMAT, "step": step, **manifest, "files": listed}, indent=1)
    write_atomically(temporary / MANIFEST, text)
    _sync(temporary)
    final = step_directory(run, step)
    if final.exists():
        _remove(final)
    os.replace(temporary, final)
    write_atomically(checkpoints_of(run) / LATEST, final.name + "\n")
    _sync(checkpoints_of(run))
    return final


def abandon(run: Path) -> None:
    """Give back the space of a save that failed."""
    shutil.rmtree(checkpoints_of(run) / TEMPORARY, ignore_errors=True)


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: what a kill leaves of the rest does not count as complete."""
    with contextlib.suppress(FileNotFoundError):
        (checkpoint / MANIFEST).unlink()
    shutil.rmtree(checkpoint)


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Give the manifest of a checkpoint, and keep `prune`, in any process of this machine, from removing it meanwhile.

    Raises:
        Damaged, UserError: see `read_manifest`.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):  # told by `read_manifest`
            fcntl.flock(held.enter_context((checkpoint / MANIFEST).open()), fcntl.LOCK_SH)
        yield read_manifest(checkpoint)


def prune(run: Path, keep: int, keep_every: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints, those at multiples of `keep_every`, and those in use."""
    for step in complete_steps(run)[:-keep]:
        if keep_every is not None and step % keep_every == 0:
            continue
        with contextlib.suppress(FileNotFoundError), (step_directory(run, step) / MANIFEST).open() as manifest:
            try:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove(step_directory(run, step))


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is no candidate any more and nothing is lost; return its new path."""
    aside = checkpoint.with_name(f"damaged_{checkpoint.name}")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(checkpoint, aside)
    return aside


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a person means: the directory itself, or the newest of a run.

    Raises:
        UserError: neither a run nor a checkpoint.
    """
    if (path / MANIFEST).is_file():
        return path
    steps = complete_steps(path)
    if not steps:
        raise UserError(f"{path}: no complete checkpoint there; give a run directory or RUN/checkpoints/step_N")
    return step_directory(path, steps[-1])
