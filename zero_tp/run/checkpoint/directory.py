"""The directory of a run's checkpoints: each checkpoint is complete or absent.

Ranks write into a temporary directory. Rank 0 writes the manifest there, renames the directory and
replaces `latest`. What a kill during the save of step 500 leaves in RUN/checkpoints:

    while ranks write           step_00000400, .writing/3f9a…     the run resumes step 400
    before the rename           the same, with a manifest         step 400; `begin` clears .writing
    between it and `latest`     step_00000400, step_00000500      step 500, which has a manifest
    while step 400 is pruned    step_00000500, .writing/77c1…     step 500; `begin` clears .writing
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.files import read_regular, remove, sync, wait_until_visible, write_atomically
from zero_tp.base.settings.removed import drop_removed_keys
from zero_tp.base.strict_json import InvalidJson, parse_json, parse_object
from zero_tp.run.checkpoint.manifest import (
    FORMAT,
    OWN_HASH,
    Manifest,
    ManifestFile,
    content_hash,
    parse_manifest,
)

if TYPE_CHECKING:
    from zero_tp.parallel.safetensors_files import FileDigest

MANIFEST = "manifest.json"
# For people and scripts. The library finds the newest checkpoint by the manifests.
LATEST = "latest"
TEMPORARY = ".writing"
# XFS reports a wrong checksum as EBADMSG and a broken structure as EUCLEAN, as ext4 does; disks
# report EIO. EFBIG and EINVAL are those of `read_regular` and `open_regular`: too large, or no
# regular file.
DAMAGE_ERRNOS = (
    errno.EBADMSG,
    errno.EFBIG,
    errno.EINVAL,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.EUCLEAN,
)
"""Errors of reading that mean damage. Others, such as a lost file server or no permission, may
be temporary.
"""
# Eight digits, or more from step 100,000,000 on (`_name`).
_STEP = re.compile(r"step_(\d{8,})")


class Damaged(UserError):
    """A file of a checkpoint is missing or has changed since it was written."""

    def __init__(self, file: Path, problem: str):
        super().__init__(f"{file}: {problem}; the checkpoint is damaged: use another one")
        self.file = file
        self.problem = problem
        self.checkpoint = file.parent

    def __reduce__(self) -> Any:
        # Ranks exchange the error by pickle. By default it would be made again from the one
        # message, which `__init__` does not accept.
        return Damaged, (self.file, self.problem)


def checkpoints_directory(run: Path) -> Path:
    return run / "checkpoints"


def step_directory(run: Path, step: int) -> Path:
    return checkpoints_directory(run) / _name(step)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def complete_steps(run: Path) -> list[int]:
    """Return the steps that have a complete checkpoint, ascending."""
    # The manifest comes into the directory last, so its presence means a complete checkpoint.
    # Whether its files are intact is another question (`check_content`).
    return [step for step in _steps(run) if (step_directory(run, step) / MANIFEST).is_file()]


def refresh_view(run: Path) -> None:
    """Make this machine see checkpoints that other machines have written to a network file system.

    An NFS client may cache a directory for `files.NFS_VIEW_SECONDS`; creating a file there makes it
    ask the server.
    """
    if checkpoints_directory(run).is_dir():
        tempfile.NamedTemporaryFile(dir=checkpoints_directory(run), prefix=".probe.").close()


def incomplete_after(source: Path, step: int) -> tuple[str, ...]:
    """Describe each incomplete checkpoint of the run `source` that is newer than `step`."""
    newer = [step_directory(source, number) for number in _steps(source) if number > step]
    incomplete = [path for path in newer if not (path / MANIFEST).is_file()]
    return tuple(f"{path}: not a checkpoint (no {MANIFEST})" for path in incomplete)


def checkpoint_notes(source: Path, checkpoint: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return lines for the log of a run that opens this checkpoint.

    Each newer incomplete checkpoint of `source` has one, and each removed key of the run's config.
    """
    _, notes = drop_removed_keys(manifest.config)
    return incomplete_after(source, manifest.step) + tuple(
        f"{checkpoint}: {note}" for note in notes
    )


def _steps(run: Path) -> list[int]:
    matches = [_STEP.fullmatch(path.name) for path in checkpoints_directory(run).glob("step_*")]
    # Names with more zeros than `_name` writes are not ours: `step_directory` would lead to another
    # one.
    return sorted(int(match[1]) for match in matches if match and match[0] == _name(int(match[1])))


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest, checked against its own hash.

    `check_sizes` and `check_content` check the files that it lists.
    """
    path = checkpoint / MANIFEST
    try:
        manifest = parse_manifest(parse_object(read_regular(path)))
    except FileNotFoundError:
        raise UserError(f"{checkpoint}: not a checkpoint (no {MANIFEST})") from None
    except ConfigError as error:
        # Another format is no damage: the version that wrote it can read it.
        if error.key == "format":
            raise UserError(f"{path}: {error.problem}; use the version that wrote it") from None
        raise Damaged(path, f"{error.key}: {error.problem}") from error
    except InvalidJson as error:
        raise Damaged(path, str(error)) from error
    except OSError as error:
        raise _read_error(path, error) from error
    # A directory that a person has renamed would resume at another step than its name says.
    if _STEP.fullmatch(checkpoint.name) and checkpoint.name != _name(manifest.step):
        raise Damaged(path, f"step is {manifest.step}, but the directory is {checkpoint.name}")
    _check_removed_keys(path, manifest)
    return manifest


def _check_removed_keys(path: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose run had a key that this version lacks, unless at its default."""
    try:
        drop_removed_keys(manifest.config)
    except ConfigError as error:
        raise UserError(
            f"{path}: {error.key}: {error.problem}; with the version that wrote it, set the key "
            "back to its default, and save another checkpoint"
        ) from None


def check_sizes(checkpoint: Path, files: Mapping[str, ManifestFile]) -> None:
    """Check that the files exist with the sizes that the manifest lists; one stat per file."""
    for name, listed in files.items():
        file = checkpoint / name
        try:
            status = file.stat()
        except OSError as error:
            raise _read_error(file, error) from error
        # A directory or a pipe of that name would fail or block when it is read.
        if not stat.S_ISREG(status.st_mode):
            raise Damaged(file, "is missing")
        if status.st_size != listed.bytes:
            raise Damaged(file, f"has {status.st_size} bytes, not {listed.bytes}")


def check_content(
    checkpoint: Path, files: Mapping[str, ManifestFile], *, progress: bool = True
) -> None:
    """Check sizes, then read the files and compare their hashes with the manifest's.

    Raises:
        Damaged: a file is missing, cannot be read, or has another size or content.
    """
    from zero_tp.parallel.safetensors_files import hash_earlier_file, hash_file

    # First, because a cut file is then named at once and not after minutes of hashing.
    check_sizes(checkpoint, files)
    total = sum(listed.bytes for listed in files.values())
    disable = None if progress else True  # tqdm's None: show the bar on a terminal only
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="verify", disable=disable, leave=False
    ) as bar:
        for name, listed in sorted(files.items()):
            file = checkpoint / name
            try:
                actual = hash_earlier_file(file) if listed.xxh3_128 is None else hash_file(file)
            except OSError as error:
                raise _read_error(file, error) from error
            expected = listed.xxh3_128 or listed.sha256 or ""
            if actual != expected:
                raise Damaged(file, f"its hash is {actual[:12]}…, not {expected[:12]}…")
            bar.update(listed.bytes)


def _read_error(file: Path, error: OSError) -> UserError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return Damaged(file, "is missing")
    if error.errno in DAMAGE_ERRNOS:
        return Damaged(file, f"cannot be read ({error.strerror})")
    return UserError(
        f"{file}: cannot be read now ({error.strerror}); the file may be intact, start again"
    )


def begin(run: Path) -> Path:
    """Remove the files of a killed save, and make a temporary directory for the ranks.

    Rank 0 calls it.

    The name is random: another machine's cache may resolve an old name to the previous save's
    directory.
    """
    remove(checkpoints_directory(run) / TEMPORARY)
    # Below a fixed name, so that the next save finds what a killed one has left.
    temporary = checkpoints_directory(run) / TEMPORARY / secrets.token_hex(8)
    temporary.mkdir(parents=True)
    return temporary


def commit(
    run: Path,
    temporary: Path,
    step: int,
    manifest: dict[str, Any],
    files: dict[str, FileDigest],
    check_owner: Callable[[], None] = lambda: None,
) -> list[str]:
    """Write the manifest and rename the temporary directory.

    Rank 0 calls it, after all ranks have written.

    Args:
        files: every file that the ranks wrote and flushed.
        check_owner: called before the checkpoint and `latest` are renamed; raises if another launch
            owns the run.

    Returns:
        Notes for the log: failures after the rename, when the checkpoint is already complete.
    """
    # Rank 0 looks at each file itself. A run directory on each node's own disk is found here,
    # before anything is renamed.
    for name, written in files.items():
        path = temporary / name
        if not wait_until_visible(partial(_has_size, path, written.size), run):
            raise UserError(
                f"{path}: missing or incomplete on rank 0's node; put the run directory on storage "
                "that all nodes share"
            )
    listed = {
        name: {"bytes": written.size, "xxh3_128": written.xxh3_128}
        for name, written in files.items()
    }
    content = {"format": FORMAT, "step": step, **manifest, "files": listed}
    text = json.dumps({**content, OWN_HASH: content_hash(content)}, indent=1)
    parse_manifest(parse_json(text))  # a manifest that cannot be read back fails the save
    write_atomically(temporary / MANIFEST, text)
    # The files are flushed already. Their names are flushed before the rename: after a crash, a
    # directory with its final name has all of them.
    sync(temporary, below=False)
    final = step_directory(run, step)
    check_owner()
    if (final / MANIFEST).is_file():
        # A complete checkpoint of this step is renamed and not removed: a kill before the next
        # rename loses nothing.
        set_aside(final, "replaced")
    elif final.exists():
        _remove(final)
    # A rename onto a directory with files fails, which is why the final name is free now.
    os.replace(temporary, final)
    # The second time, for `latest`: another launch may have come since, and have written its own.
    check_owner()
    try:
        temporary.parent.rmdir()
        sync(checkpoints_directory(run), below=False)
        write_atomically(checkpoints_directory(run) / LATEST, final.name + "\n")
    except OSError as error:
        # The checkpoint has its name and its manifest, so this is no failed save.
        return [f"{final} is complete, but {error.filename or run}: {error.strerror}"]
    return []


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def abandon(temporary: Path) -> None:
    """Remove the files of a failed save."""
    shutil.rmtree(temporary, ignore_errors=True)
    with contextlib.suppress(OSError):
        temporary.parent.rmdir()


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint.

    It is renamed into the directory that the next `begin` clears, and deleted there.
    """
    renamed = checkpoint.parent / TEMPORARY / secrets.token_hex(8)
    renamed.parent.mkdir(exist_ok=True)
    # One rename makes it absent at once. Removing files in place would leave an incomplete
    # checkpoint under its name if it is interrupted.
    os.replace(checkpoint, renamed)
    remove(renamed)
    with contextlib.suppress(OSError):  # not empty while a save is being written
        renamed.parent.rmdir()


def prune(run: Path, keep: int, keep_every: int | None = None) -> list[int]:
    """Remove old checkpoints; return their steps.

    The newest `keep` stay, and all at multiples of `keep_every`.
    """
    # Flush the names of the remaining checkpoints first.
    sync(checkpoints_directory(run), below=False)
    removed = []
    # From the oldest on, so that a kill in between leaves the newest ones.
    for step in complete_steps(run)[:-keep]:
        if keep_every is None or step % keep_every:
            _remove(step_directory(run, step))
            removed.append(step)
    return removed


def set_aside_newer(run: Path, step: int) -> list[str]:
    """Set aside the checkpoints that are newer than `step`; return a line on each.

    The run resumes from `step`.

    Rank 0 calls it before the run's logs are truncated at `step`. The newest is moved last, so a
    run that is killed in between still resumes from it.
    """
    notes = []
    # `complete_steps` is ascending, so the newest is moved last.
    for newer in complete_steps(run):
        if newer > step:
            aside = set_aside(step_directory(run, newer), "abandoned")
            notes.append(
                f"step {newer} belongs to the branch abandoned at step {step}: set aside as {aside}"
            )
    return notes


def set_aside(checkpoint: Path, reason: str = "damaged") -> Path:
    """Rename a checkpoint to an unused name that no run resumes from; return the new path.

    `latest` then names the newest remaining checkpoint; it is removed if none remains.
    """
    run = checkpoint.parent.parent
    others = [step for step in complete_steps(run) if step_directory(run, step) != checkpoint]
    # `latest` is changed before the rename, so it never names a checkpoint that is gone.
    if others:
        write_atomically(checkpoints_directory(run) / LATEST, _name(others[-1]) + "\n")
    else:
        (checkpoints_directory(run) / LATEST).unlink(missing_ok=True)
    aside = checkpoint.with_name(f"{reason}_{checkpoint.name}")
    count = 1
    while os.path.lexists(aside):
        count += 1
        aside = checkpoint.with_name(f"{reason}_{checkpoint.name}.{count}")
    os.replace(checkpoint, aside)
    sync(checkpoint.parent, below=False)
    return aside


def is_run(path: Path) -> bool:
    """Return whether a directory is a run or a complete checkpoint."""
    return checkpoints_directory(path).is_dir() or (path / MANIFEST).is_file()
