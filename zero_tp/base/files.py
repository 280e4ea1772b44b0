"""Read files of bounded size, write files and directories atomically, and wait for network file
systems.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import psutil

from zero_tp.base.errors import UserError

MAX_FILE_BYTES = 2**28
"""The largest JSON file that is read [bytes]; Python needs up to ten times as much memory."""
NFS_VIEW_SECONDS = 60.0
"""How long an NFS client may cache attributes: the defaults of acregmax and acdirmax."""
# File systems that only one machine mounts.
_LOCAL = frozenset(
    {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"}
)
_IRREPLACEABLE = {
    errno.EBUSY: "it is a mount point, and only a directory inside it can be replaced: give one",
    errno.EXDEV: "it is in a lower layer of its file system, as a container's image is: give "
    "another directory",
    errno.EPERM: "it is another user's, and the directory above it has the sticky bit: give "
    "another directory",
    errno.EACCES: "it or a directory in it is not writable for this user: give another directory",
}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by a file that holds `content`. A reader finds the old file or the new one,
    also after a crash.

    Surrogates in `content`, from file names that are not UTF-8, are written as \\udcXX.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # In the same directory, because a rename is atomic only within one file system.
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("wb") as stream:
            stream.write(
                content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
            )
            stream.flush()
            # Before the rename: after a crash the new name could otherwise have an empty file.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file that the user has named atomically, and make its directory."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise UserError(
            f"{path}: can't be written ({error.strerror or error}); give another path"
        ) from None


@contextlib.contextmanager
def partial_directory(output: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """Make an empty hidden directory next to `output`. This process locks it; the end of the block
    removes it.

    Files of a killed process are removed first, and an output that it was replacing is put back.

    Args:
        own: names of the directories that zero_tp writes in an output. Others in an old output are
            the user's; the end of the block moves them to the new one.

    Raises:
        UserError: another process writes the output, or there is one that can't be replaced.
    """
    partial = hidden_sibling(output, "partial")
    try:
        try:
            partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS) or not output.is_dir():
                raise
            problem = f"can't be replaced: {partial.parent} is not writable for this user"
            raise UserError(f"{output}: {problem}: give a directory inside {output}") from error
        with _locked(partial, output) as descriptor:
            try:
                _finish_replacing(output, own)
                for path in partial.iterdir():
                    remove(path)
                if output.is_dir():
                    _check_replaceable(output, partial)
                yield partial
            finally:
                _finish_replacing(output, own)
                if _is_same_directory(descriptor, partial):  # else it is the output now
                    shutil.rmtree(partial, ignore_errors=True)
    except (KeyboardInterrupt, SystemExit):  # also from a signal between creation and lock
        clear_partial(output, own)
        raise


@contextlib.contextmanager
def _locked(partial: Path, output: Path) -> Iterator[int]:
    """Lock a directory inside the block; return its open descriptor."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            locked = lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_directory(descriptor, partial):
                raise BlockingIOError  # its owner has renamed it to the output in the meantime
        except BlockingIOError:
            raise UserError(
                f"{output}: another process writes it now: wait for it, or choose another --output"
            ) from None
        if not locked and any(partial.iterdir()):
            raise UserError(
                f"{partial} was left by another process: remove it unless that process still runs"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _is_same_directory(descriptor: int, path: Path) -> bool:
    """Return whether `path` is this open directory, which has not been renamed."""
    return path.is_dir() and os.path.samestat(os.fstat(descriptor), path.stat())


def lock(file: IO[Any] | int, kind: int) -> bool:
    """Lock an open file until it is closed; return False if its file system has no locks.

    Raises:
        BlockingIOError: another process has the lock.
    """
    try:
        # The kernel releases this lock when its process ends, also when it is killed.
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file, a link or a directory with all below it; nothing of this name is no error.

    Of a link only the link goes, and its target stays.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clear_partial(output: Path, own: Collection[str] = ()) -> None:
    """Remove the hidden directories that a killed process left. See `partial_directory`."""
    with contextlib.suppress(UserError, OSError):
        if (
            hidden_sibling(output, "partial").is_dir()
            or hidden_sibling(output, "replaced").is_dir()
        ):
            with partial_directory(output, own):
                pass


def check_replaceable(output: Path, own: Collection[str] = ()) -> None:
    """Check that an existing output can be replaced, before long work. UserError: it can't; see
    `partial_directory`.
    """
    if output.exists():
        with partial_directory(Path(os.path.realpath(output)), own):
            pass


def _check_replaceable(output: Path, partial: Path) -> None:
    """Check that `output` could be replaced, by a rename that has to fail.

    A directory cannot be renamed to one that has a file. If the system has another objection, such
    as a mount point, its error is that one.
    """
    (partial / "file").touch()
    try:
        # The old output is removed after the renames, which needs access to all its directories.
        for path in (output, *output.rglob("*")):
            if (
                path.is_dir()
                and not path.is_symlink()
                and not os.access(path, os.R_OK | os.W_OK | os.X_OK)
            ):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        os.rename(output, partial)
    except OSError as error:
        if error.errno in _IRREPLACEABLE:
            raise UserError(
                f"{output}: can't be replaced: {_IRREPLACEABLE[error.errno]}"
            ) from error
    finally:
        (partial / "file").unlink()


def put_in_place(
    written: Path, output: Path, is_stale: Callable[[str], bool] = lambda name: False
) -> None:
    """Rename a `partial_directory` to its output. The user's own files in an old output stay.

    Args:
        is_stale: returns whether a file of this name is ours, not the user's, and is removed with
            the old output.
    """
    for file in output.iterdir() if output.exists() else ():
        is_replaced = is_stale(file.name) or (written / file.name).exists()
        if not is_replaced and (file.is_symlink() or not file.is_dir()):
            try:
                # A hard link takes neither time nor space, and the old output keeps its file until
                # it is removed.
                os.link(file, written / file.name, follow_symlinks=False)
            except OSError:  # a file system without hard links
                shutil.copy2(file, written / file.name, follow_symlinks=False)
    # The content first and the names last: after a crash the output is the old one or the new one.
    sync(written)
    replace_directory(written, output)
    sync(output.absolute().parent, below=False)


def replace_directory(written: Path, output: Path) -> None:
    """Replace a directory by two renames. In between, the old one is `.NAME.replaced`.

        before          .out.partial (new)     out (old)
        first rename    .out.partial (new)                  .out.replaced (old)
        second rename                          out (new)    .out.replaced (old)

    A kill in between loses nothing: `_finish_replacing` puts the old one back, or removes it.
    """
    if output.exists():
        os.replace(output, hidden_sibling(output, "replaced"))
    os.replace(written, output)


def _finish_replacing(output: Path, own: Collection[str]) -> None:
    """Put a replaced directory back if there is no new one.

    If there is one, the user's own directories are moved to it, and the rest is removed.

    Two processes may do this at once: after its rename, a partial directory no longer locks its
    output.
    """
    replaced = hidden_sibling(output, "replaced")
    if not replaced.is_dir():
        return
    with contextlib.suppress(FileNotFoundError):  # another process has moved or removed it
        if not output.exists():
            os.replace(replaced, output)
            return
        for directory in replaced.iterdir():
            is_users = (
                directory.is_dir() and not directory.is_symlink() and directory.name not in own
            )
            if is_users and not (output / directory.name).exists():
                with contextlib.suppress(FileNotFoundError):
                    os.replace(directory, output / directory.name)
        shutil.rmtree(replaced)


def hidden_sibling(output: Path, ending: str) -> Path:
    """Return the hidden path `.NAME.ending` in the directory of `output`."""
    # Next to the output, because a rename works only within one file system.
    name = output.absolute().name
    if len(os.fsencode(name)) > 200:  # a name has at most 255 bytes
        name = hashlib.sha256(os.fsencode(name)).hexdigest()[:32]
    return output.absolute().parent / f".{name}.{ending}"


def sync(directory: Path, *, below: bool = True) -> None:
    """Flush a directory and, by default, everything below it to disk."""
    for path in (directory.resolve(), *(directory.rglob("*") if below else ())):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):  # no content to flush
            continue
        # Directories, too: flushing a file does not flush its name (fsync(2)).
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def wait_until_visible(is_visible: Callable[[], bool], directory: Path) -> bool:
    """Wait until this machine sees a change by another machine in a directory; return False if it
    does not.

    A local file system needs no wait. On a network file system it ends after `NFS_VIEW_SECONDS` +
    5.
    """
    deadline = time.monotonic() + (0 if is_local(directory) else NFS_VIEW_SECONDS + 5)
    while not (visible := is_visible()) and time.monotonic() < deadline:
        # A network file system reports no changes, so it is asked again.
        time.sleep(0.5)
    return visible


def is_local(path: Path) -> bool:
    """Return whether only this machine writes to the file system of a path."""
    resolved = path.resolve()
    mounts = [
        mount
        for mount in psutil.disk_partitions(all=True)
        if resolved.is_relative_to(mount.mountpoint)
    ]
    # The longest mount point is the innermost; a later mount at the same point hides an earlier
    # one.
    innermost = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    return innermost is not None and innermost.fstype in _LOCAL


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading. Pipes and devices are refused without waiting."""
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with os.fdopen(descriptor, "rb") as file:
        yield file


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file of at most `MAX_FILE_BYTES`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(
                errno.EFBIG, f"{size:,} bytes, at most {MAX_FILE_BYTES:,} are read", str(path)
            )
        # Bounded once more, because another process may write to the file after its size was read.
        return file.read(MAX_FILE_BYTES)
