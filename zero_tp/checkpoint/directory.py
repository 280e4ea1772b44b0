"""A run's `checkpoints/` holds its checkpoints.

A checkpoint is complete or it isn't there: ranks write into a temporary directory, which is renamed once its manifest
is written; `latest` is replaced after that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_tp.checkpoint.manifest import (
    FORMAT,
    OWN_HASH,
    InvalidManifest,
    Manifest,
    ManifestFile,
    OtherFormat,
    content_hash,
    parse_manifest,
)
from zero_tp.errors import UserError
from zero_tp.files import lock, read_regular, remove, sync, write_atomically
from zero_tp.machine import wait_until_visible
from zero_tp.strict_json import InvalidJson, parse_json, parse_object

if TYPE_CHECKING:
    from zero_tp.tensors.files import Written

MANIFEST, LATEST, TEMPORARY = "manifest.json", "latest", ".writing"
_STEP = re.compile(r"step_(\d{8,})")


class Damaged(UserError):
    """A file of a checkpoint is not as it was written.

    Attributes:
        file: which one; `checkpoint`: the directory of the checkpoint.
    """

    def __init__(self, file: Path, problem: str):
        super().__init__(f"{file}: {problem}; the checkpoint is damaged: use another one")
        self.file, self.problem, self.checkpoint = file, problem, file.parent


def checkpoints_of(run: Path) -> Path:
    return run / "checkpoints"


def step_directory(run: Path, step: int) -> Path:
    return checkpoints_of(run) / _name(step)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending."""
    return [step for step in _steps(run) if (step_directory(run, step) / MANIFEST).is_file()]


def refresh_view(run: Path) -> None:
    """Make this machine see the checkpoints that others have written to a network file system.

    NFS may show a machine for `VIEW_SECONDS` what a directory held before. A change by the machine itself makes it ask
    the server again.

    Raises:
        OSError: nothing can be written there.
    """
    if checkpoints_of(run).is_dir():
        probe = checkpoints_of(run) / f".probe.{secrets.token_hex(8)}"
        probe.touch()
        probe.unlink()


def incomplete_since(run: Path, step: int) -> list[Path]:
    """Return the directories of newer steps that have no manifest, ascending: a save leaves none."""
    newer = [step_directory(run, number) for number in _steps(run) if number > step]
    return [path for path in newer if not (path / MANIFEST).is_file()]


def passed_over(source: Path, step: int) -> tuple[str, ...]:
    """Return a line on each newer directory of a run that is no checkpoint; none where `source` is a checkpoint."""
    return tuple(f"{path}: has no {MANIFEST}, so that it is no checkpoint" for path in incomplete_since(source, step))


def _steps(run: Path) -> list[int]:
    matches = [_STEP.fullmatch(path.name) for path in checkpoints_of(run).glob("step_*")]
    return sorted(int(match[1]) for match in matches if match and match[0] == _name(int(match[1])))


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest. Its files are not looked at: see `check_sizes`.

    Raises:
        Damaged: it can't be read, has another hash than it says, or is of another step.
        UserError: it is not a checkpoint, or of another format.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = _parsed(read_regular(path))
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: not a checkpoint (no {MANIFEST})") from None
    except OtherFormat as error:
        raise UserError(f"{path}: {error}; use the version that wrote it") from None
    except (InvalidJson, InvalidManifest, OSError) as error:
        raise Damaged(path, str(error)) from error
    if _STEP.fullmatch(checkpoint.name) and checkpoint.name != _name(manifest.step):
        raise Damaged(path, f"is of step {manifest.step}, but its directory is {checkpoint.name}")
    return manifest


@lru_cache(maxsize=1)
def _parsed(content: bytes) -> Manifest:
    """Return the manifest that a file holds; the same one for the same bytes, as a start reads it four times."""
    return parse_manifest(parse_object(content))


def check_sizes(checkpoint: Path, files: Mapping[str, ManifestFile]) -> None:
    """Check that these files are there and as long as the manifest says. One stat each: ranks share them out.

    Raises:
        Damaged: one is missing or has another size.
    """
    for name, manifested in files.items():
        file = checkpoint / name
        try:
            found = file.stat()
        except OSError as error:
            raise Damaged(file, _unread(error)) from error
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(file, "is missing")
        _check_size(file, found.st_size, manifested)


def _check_size(file: Path, found: int, manifested: ManifestFile) -> None:
    if found != manifested.bytes:
        raise Damaged(file, f"has {found} bytes, not {manifested.bytes}")


def _unread(error: OSError) -> str:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return "is missing" if missing else f"cannot be read ({error.strerror})"


def check_file(file: Path, manifested: ManifestFile, read: Callable[[], Written] | None = None) -> None:
    """Check that a file has the size and the SHA-256 that the manifest says.

    Args:
        read: gives what was found, where it isn't read here.

    Raises:
        Damaged: it has another one, is missing, or cannot be read.
    """
    from zero_tp.tensors.files import read_hashed

    try:
        found = read() if read else read_hashed(file)
    except OSError as error:
        raise Damaged(file, _unread(error)) from error
    _check_size(file, found.size, manifested)
    if found.sha256 != manifested.sha256:
        raise Damaged(file, f"SHA-256 is {found.sha256[:12]}…, not {manifested.sha256[:12]}…")


def begin(run: Path) -> Path:
    """Make a fresh temporary directory for the ranks to write into; what a killed save left goes. One rank calls it.

    Its name was never used before: another machine may remember for a minute what a name stood for, and the directory
    of the last save has become a checkpoint.
    """
    remove(checkpoints_of(run) / TEMPORARY)
    temporary = checkpoints_of(run) / TEMPORARY / secrets.token_hex(8)
    temporary.mkdir(parents=True)
    return temporary


def commit(
    run: Path,
    temporary: Path,
    step: int,
    manifest: dict[str, Any],
    files: dict[str, Written],
    check_owner: Callable[[], None] = lambda: None,
) -> list[str]:
    """Give the written files their name. One rank calls it, when all have written.

    Args:
        files: every file that the ranks wrote and flushed.
        check_owner: called before the checkpoint and `latest` are renamed; raises if the run is another launch's.

    Returns:
        A line on each thing that failed when the checkpoint had its name, and what follows from it.

    Raises:
        RuntimeError: a file is not there as it was written.
        InvalidManifest, InvalidJson: the manifest is none.
        OSError: the disk is full or gone.
    """
    for name, written in files.items():
        path = temporary / name
        if not wait_until_visible(partial(_is_there, path, written.size), run):
            raise RuntimeError(f"{path}: not there as its rank wrote it; is the run directory shared by all nodes?")
    listed = {
        name: {"bytes": written.size, "sha256": written.sha256, "parts": list(written.parts)}
        for name, written in files.items()
    }
    whole = {"format": FORMAT, "step": step, **manifest, "files": listed}
    text = json.dumps({**whole, OWN_HASH: content_hash(whole)}, indent=1)
    parse_manifest(parse_json(text))  # what cannot be read again is not saved
    write_atomically(temporary / MANIFEST, text)
    sync(temporary, below=False)
    final = step_directory(run, step)
    check_owner()
    if (final / MANIFEST).is_file():
        set_aside(final, "replaced")
    elif final.exists():
        _remove(final)
    os.replace(temporary, final)
    check_owner()
    notes = []
    for work, follows in (
        (partial(write_atomically, checkpoints_of(run) / LATEST, final.name + "\n"), "it may name an older one"),
        (partial(sync, checkpoints_of(run), below=False), "a crash of this machine may lose it"),
        (temporary.parent.rmdir, "the next save removes it"),
    ):
        try:
            work()
        except OSError as error:
            notes.append(f"{final} is complete, but {error.filename or run}: {error.strerror}; {follows}")
    return notes


def _is_there(path: Path, size: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size == size


def abandon(temporary: Path) -> None:
    """Give back the space of a save that failed."""
    shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        temporary.parent.rmdir()


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: what a kill leaves of the rest does not count as complete."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (checkpoint / MANIFEST).unlink()
    remove(checkpoint)


@contextlib.contextmanager
def in_use(checkpoint: Path) -> Iterator[Manifest]:
    """Give the manifest of a checkpoint, and keep `prune`, in any process of this machine, from removing it meanwhile.

    Raises:
        Damaged, UserError: see `read_manifest`.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # told by `read_manifest`
            lock(held.enter_context((checkpoint / MANIFEST).open("rb")), fcntl.LOCK_SH)
        yield read_manifest(checkpoint)


def prune(run: Path, keep: int, keep_every: int | None = None, saved: int | None = None) -> list[int]:
    """Remove all but the newest `keep` checkpoints, those at multiples of `keep_every`, those in use, and `saved`, the
    step that was just saved; return the steps that were removed."""
    sync(checkpoints_of(run), below=False)  # those that stay have their names on the disk
    removed = []
    for step in complete_steps(run)[:-keep]:
        if step == saved or (keep_every is not None and step % keep_every == 0):
            continue
        with contextlib.suppress(FileNotFoundError), (step_directory(run, step) / MANIFEST).open("r+b") as manifest:
            try:
                lock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            _remove(step_directory(run, step))
            removed.append(step)
    return removed


def start_branch(run: Path, step: int) -> list[str]:
    """Set aside the checkpoints newer than `step`, from which the run goes on: they belong to a branch that it left.

    One rank calls it before the run's files are cut at `step`. The newest goes last: a kill before that leaves a run
    that goes on from it.

    Returns:
        A line on each.
    """
    notes = []
    for newer in complete_steps(run):
        if newer > step:
            aside = set_aside(step_directory(run, newer), "abandoned")
            notes.append(f"step {newer} is of the branch that was left at step {step}: set aside as {aside}")
    return notes


def set_aside(checkpoint: Path, why: str = "damaged") -> Path:
    """Rename a checkpoint, so that it is no candidate any more and nothing is lost; return its new path.

    It gets a name that nothing has. `latest` names the newest of the others, or is gone with the last one.
    """
    run = checkpoint.parent.parent
    others = [step for step in complete_steps(run) if step_directory(run, step) != checkpoint]
    if others:
        write_atomically(checkpoints_of(run) / LATEST, _name(others[-1]) + "\n")
    else:
        (checkpoints_of(run) / LATEST).unlink(missing_ok=True)
    aside, count = checkpoint.with_name(f"{why}_{checkpoint.name}"), 1
    while os.path.lexists(aside):
        count += 1
        aside = checkpoint.with_name(f"{why}_{checkpoint.name}.{count}")
    os.replace(checkpoint, aside)
    sync(checkpoint.parent, below=False)
    return aside


def is_run(path: Path) -> bool:
    """Return whether a directory is a run or a complete checkpoint; any other can only be a Hugging Face model's."""
    return checkpoints_of(path).is_dir() or (path / MANIFEST).is_file()


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that a person means: the directory itself, or the newest of a run.

    Raises:
        UserError: neither a run nor a checkpoint.
    """
    try:
        if (path / MANIFEST).is_file():
            return path
        steps = complete_steps(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give a run or a checkpoint") from error
    if not steps:
        raise UserError(f"{path}: no complete checkpoint there; give a run directory or RUN/checkpoints/step_N")
    return step_directory(path, steps[-1])
