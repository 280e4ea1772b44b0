"""Facts about processes of this machine."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[str]:
    """Return what Linux says of a process after its name, from `state` on (proc_pid_stat(5)); nothing without it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat[stat.rindex(")") + 2 :].split()  # the name may hold blanks and brackets
