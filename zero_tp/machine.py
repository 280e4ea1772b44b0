"""A machine is told from all others, its processes from those before them, and its file systems from shared ones."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil

VIEW_SECONDS = 60.0
"""How old a machine's view of a network file system may be: NFS' acregmax and acdirmax, if nothing else is set."""
# File systems that one machine mounts alone.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"})


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
