"""Read files of bounded size, and write small ones whole or not at all; replace directories at once."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from zero_tp.errors import UserError

MOST_BYTES = 2**28
"""JSON files are at most as long as this, of which Python makes up to ten times as much."""
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by a file that holds `content`. A reader finds the old file or the new one, also after a crash.

    Raises:
        OSError: the disk is full, the directory is missing or cannot be written, or `path` is a device or the like.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as stream:
            stream.write(content if isinstance(content, bytes) else content.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file that a person has named, whole or not at all, and make its directory.

    Raises:
        UserError: it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(f"{path}: can't be written ({error.strerror or error}); give another path") from None


@contextlib.contextmanager
def partial_directory(output: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """Make an empty hidden directory beside `output`, of this process alone, which is gone at the end of the block.

    What a killed process left there is cleared first.

    Args:
        own: names of directories that are written here. Every other one that is in it after `put_in_place` is a
            person's, and goes back to `output`: it can't be in two places, as files can.

    Raises:
        UserError: another process is writing there.
        OSError: it cannot be made.
    """
    partial = _partial(output)
    partial.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        held = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, held)
        try:
            locked = lock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{output}: another process writes it now: wait for it, or choose another --output"
            ) from None
        if not locked and any(partial.iterdir()):
            raise UserError(f"{partial} is left of another process: remove it unless that still runs")
        try:
            _give_back(partial, output, own)
            for each in partial.iterdir():
                remove(each)
            yield partial
        finally:
            if partial.is_dir():  # no longer, where it has become the output
                _give_back(partial, output, own)
                shutil.rmtree(partial, ignore_errors=True)


def lock(file: IO[Any] | int, kind: int) -> bool:
    """Take a lock of an open file, which the kernel frees if its holder dies; return whether its file system has locks.

    Raises:
        BlockingIOError: another process holds it.
    """
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def remove(path: Path) -> None:
    """Remove what has this name, if anything: a file, a link (not what it points to), or a directory with all below it.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_partial(output: Path, own: Collection[str] = ()) -> None:
    """Clear what a killed process left of `output`; one that still runs keeps it. See `partial_directory`."""
    with contextlib.suppress(UserError, OSError):
        if _partial(output).is_dir():
            with partial_directory(output, own):
                pass


def put_in_place(written: Path, output: Path, stale: Callable[[str], bool] = lambda name: False) -> None:
    """Give what was written in a `partial_directory` its name, at once. What else a person keeps there stays there.

    Args:
        stale: tells of a file's name whether it belongs to what is replaced; those that are written anew do.

    Raises:
        OSError: the disk is full, or the directory cannot be written.
    """
    old = list(output.iterdir()) if output.exists() else []
    for file in old:
        replaced = stale(file.name) or (written / file.name).exists()
        if not replaced and (file.is_symlink() or not file.is_dir()):
            try:
                os.link(file, written / file.name, follow_symlinks=False)
            except OSError:  # a file system without hard links
                shutil.copy2(file, written / file.name, follow_symlinks=False)
    sync(written)
    if old:
        exchange(written, output)
    else:
        os.replace(written, output)
    sync(output.absolute().parent, below=False)


def _give_back(left: Path, output: Path, own: Collection[str]) -> None:
    for directory in left.iterdir() if output.is_dir() else ():
        persons = directory.is_dir() and not directory.is_symlink() and directory.name not in own
        if persons and not (output / directory.name).exists():
            os.replace(directory, output / directory.name)


def _partial(output: Path) -> Path:
    return hidden_beside(output, "partial")


def hidden_beside(output: Path, ending: str) -> Path:
    """Return the path beside `output` of what is kept for it while it isn't whole: `.NAME.ending`."""
    name = output.absolute().name
    if len(os.fsencode(name)) > 200:  # a name has at most 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return output.absolute().parent / f".{name}.{ending}"


def exchange(first: Path, second: Path) -> None:
    """Exchange two files or directories of one file system, at once where the system can (Linux 3.15), else in three
    renames.

    Raises:
        OSError: one is missing, or the directory cannot be written.
    """
    at_the_working_directory, exchanging = -100, 2
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None:
        paths = (at_the_working_directory, os.fsencode(first), at_the_working_directory, os.fsencode(second))
        if rename(*paths, ctypes.c_uint(exchanging)) == 0:
            return
        number = ctypes.get_errno()
        if number not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(number, os.strerror(number), str(second))
    between = first.with_name(f"{first.name}.exchanged")
    second.rename(between)
    first.rename(second)
    between.rename(first)


def sync(directory: Path, *, below: bool = True) -> None:
    """Wait until the disk has a directory, and by default all files and directories that are below it.

    Raises:
        OSError: the disk is full or gone.
    """
    for each in (directory.resolve(), *(directory.rglob("*") if below else ())):
        if each.is_symlink() or not (each.is_file() or each.is_dir()):  # a name in its directory, and nothing more
            continue
        descriptor = os.open(each, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. A pipe or a device, which may never end, is refused and never waited on.

    Raises:
        OSError: it is missing, cannot be read, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_regular(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most` bytes.

    Raises:
        OSError: as of `open_regular`, or it is longer.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size:,} bytes, at most {most:,} are read", str(path))
        return file.read(most)
