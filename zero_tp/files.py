"""Read small JSON files, and write small text files whole or not at all, on file systems that machines may share."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import psutil

from zero_tp.errors import ConfigError, UserError, shown

MOST_BYTES = 2**28
"""JSON files are at most as long as this, of which Python makes up to ten times as much."""
VIEW_SECONDS = 60.0
"""How old a machine's view of a network file system may be: NFS' acregmax and acdirmax, if nothing else is set."""
# File systems that one machine mounts alone.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"})
_MOST_DIGITS, _MOST_LEVELS = 100, 100
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
    """Wait until the disk has a directory, and by default all that is below it.

    Raises:
        OSError: the disk is full or gone.
    """
    for each in (directory.resolve(), *(directory.rglob("*") if below else ())):
        descriptor = os.open(each, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class InvalidJson(ValueError):
    """An InvalidJson says what is wrong with a text that should be JSON, and where in it."""


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


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text: strict UTF-8 JSON, whose every key and number means one thing.

    Raises:
        InvalidJson: it is not JSON (with line and column), holds a key twice, NaN or Infinity, an integer of more than
            100 digits, an unpaired surrogate, or more than 100 levels.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InvalidJson(f"the key {shown(twice)} appears twice in one object")
        return found

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise InvalidJson(f"{number[:60]} is not a finite number")
        return float(number)

    def bounded(number: str) -> int:
        if len(number) > _MOST_DIGITS:
            raise InvalidJson(f"an integer of {len(number.lstrip('-')):,} digits")
        return int(number)

    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            decoded, object_pairs_hook=without_duplicates, parse_float=finite, parse_constant=finite, parse_int=bounded
        )
    except json.JSONDecodeError as error:
        raise InvalidJson(f"not valid JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise InvalidJson(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise InvalidJson("not valid JSON: nested too deeply") from None
    _check_parts(value)
    return value


def _check_parts(value: Any) -> None:
    level = [value]
    for _ in range(_MOST_LEVELS):
        for part in level:
            if isinstance(part, str) and not part.isascii():
                try:
                    part.encode("utf-8")
                except UnicodeEncodeError as error:
                    raise InvalidJson(f"unpaired surrogate at character {error.start} of a string") from None
        objects = (part for part in level if isinstance(part, dict))
        lists = (part for part in level if isinstance(part, list))
        level = [inner for part in objects for pair in part.items() for inner in pair] + [
            inner for part in lists for inner in part
        ]
        if not level:
            return
    raise InvalidJson("not valid JSON: nested too deeply")


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        OSError: see `read_regular`.
        InvalidJson: see `parse_object`.
    """
    return parse_object(read_regular(path))


def parse_object(text: bytes) -> dict[str, Any]:
    """Return the object that a JSON text is.

    Raises:
        InvalidJson: see `parse_json`; or it is not an object.
    """
    value = parse_json(text)
    if not isinstance(value, dict):
        raise InvalidJson(f"holds {shown(value)}, not an object")
    return value


def read_json(path: Path, remedy: str = "give the path of a JSON config, or a name of ds_configs") -> dict[str, Any]:
    """Return the object in a JSON file that a person has named.

    Args:
        remedy: what to do where there is no such file.

    Raises:
        ConfigError: it cannot be read, or is not an object in strict JSON (see `parse_json`).
    """
    try:
        return read_object(path)
    except FileNotFoundError:
        raise ConfigError(str(path), "no such file", remedy) from None
    except OSError as error:
        raise ConfigError(str(path), f"can't be read ({error.strerror or error})", remedy) from None
    except InvalidJson as error:
        raise ConfigError(str(path), str(error), "mend the file") from None


# ---- which machine's files -------------------------------------------------------------------------------------------


def this_machine() -> str:
    """Return what tells this machine, since its start, from all others, and a container from the next."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # there is no /proc
        return socket.gethostname()


def stat_fields(pid: int) -> list[str]:
    """Return what Linux says of a process after its name, from `state` on (proc_pid_stat(5)); nothing without it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat[stat.rindex(")") + 2 :].split()  # the name may hold blanks and brackets


def started(pid: int) -> str:
    """Return when a process started, in ticks since the machine did, which no clock moves; "" where it is gone."""
    fields = stat_fields(pid)
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def arrives(there: Callable[[], bool], directory: Path) -> bool:
    """Wait until something shows that another machine has written in a directory; False where it does not.

    On a file system of this machine alone it is there at once, or not at all.
    """
    deadline = time.monotonic() + (0 if is_local(directory) else VIEW_SECONDS + 5)
    while not (found := there()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def is_local(path: Path) -> bool:
    """Tell whether a path is on a file system that this machine has for itself."""
    where = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if where.is_relative_to(each.mountpoint)]
    deepest = max((len(each.mountpoint) for each in mounts), default=0)
    kinds = [each.fstype for each in mounts if len(each.mountpoint) == deepest]
    return bool(kinds) and kinds[-1] in _LOCAL  # the last mount covers those before it
