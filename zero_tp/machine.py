"""Facts about this machine: its processes, and which file systems it shares with others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

VIEW_SECONDS = 60.0
"""How old a machine's view of a network file system may be: NFS' acregmax and acdirmax, if nothing else is set."""
# File systems that one machine mounts alone.
_LOCAL = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "vfat", "xfs", "zfs"})


def stat_fields(pid: int) -> list[str]:
    """Return what Linux says of a process after its name, from `state` on (proc_pid_stat(5)); nothing without it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat[stat.rindex(")") + 2 :].split()  # the name may hold blanks and brackets


def wait_until_visible(is_visible: Callable[[], bool], directory: Path) -> bool:
    """Wait until this machine sees what another has written in a directory; return False if it does not.

    On a local file system it is visible at once or never. On any other one the wait ends after `VIEW_SECONDS` + 5.
    """
    deadline = time.monotonic() + (0 if is_local(directory) else VIEW_SECONDS + 5)
    while not (visible := is_visible()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return visible


def is_local(path: Path) -> bool:
    """Tell whether a path is on a file system that this machine has for itself."""
    where = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if where.is_relative_to(each.mountpoint)]
    deepest = max((len(each.mountpoint) for each in mounts), default=0)
    kinds = [each.fstype for each in mounts if len(each.mountpoint) == deepest]
    return bool(kinds) and kinds[-1] in _LOCAL  # the last mount covers those before it
