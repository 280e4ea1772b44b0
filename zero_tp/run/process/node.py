"""Watch the processes of this machine.

A rank ends with its launcher, and reports other ranks that were killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from zero_tp.base.errors import write_stderr
from zero_tp.run.process.environment import RANK, RankEnvironment, is_alive, rank_name

POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: psutil.Process) -> None:
    """Let the kernel kill this process when its parent ends.

    This works even if C code holds the interpreter's lock.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it has ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


class NodeWatch:
    """Watch the other ranks of this machine and the `deepspeed` command.

    The ranks are the launcher's children, the command is its parent.

    A rank that is killed prints nothing, so the lowest surviving rank of the machine reports it.

    Args:
        on_deepspeed_end: called in a thread when the `deepspeed` command has ended.
    """

    def __init__(
        self, environment: RankEnvironment, on_deepspeed_end: Callable[[], object]
    ) -> None:
        self._environment = environment
        self._on_deepspeed_end = on_deepspeed_end
        self._deepspeed = environment.deepspeed_command()
        self._ranks: dict[int, psutil.Process] = {}
        self._error_files: dict[int, Path] = {}
        self._ended: dict[int, int | None] = {}
        self._reported = set[int]()
        # Several threads report: the node watch, that of the signals, and the main thread of a
        # failing rank.
        self._reporting = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()

    def exit_statuses(self) -> dict[int, int | None]:
        """Return the exit status of each rank that has ended.

        -N if signal N killed it, None if unknown.

        Launchers reap a zombie, and with it the exit status, within a second. If that was too fast,
        torchrun's error file of the rank shows that it failed by itself.
        """
        for rank, process in list(self._ranks.items()):
            if rank not in self._ended and not is_alive(process):
                # Read while it is a zombie. Afterwards nobody but the launcher knows how it ended.
                status = _exit_status(process)
                failed = status is None and self._error_files[rank].is_file()
                self._ended.setdefault(rank, 1 if failed else status)
        return dict(self._ended)

    def all_running(self) -> bool:
        """Return whether all ranks of this machine have been found, and none has ended."""
        return self._knows_all_ranks() and not self.exit_statuses()

    def report_killed(self, *, include_unknown: bool = False) -> None:
        """Print the ranks that were killed, once each, if this is the lowest surviving rank.

        Args:
            include_unknown: also print the first rank that ended if its status is unknown, unless
                the `deepspeed` command has ended.
        """
        with self._reporting:  # no other thread may exit the process before the line is written
            ended = self.exit_statuses()
            # One line for the machine, although each of its ranks sees the same.
            is_lowest = all(
                rank in ended or rank > self._environment.rank for rank in list(self._ranks)
            )
            for rank, status in ended.items():
                is_first = rank == next(iter(ended))
                prints_unknown = include_unknown and is_first and not self._deepspeed_has_ended()
                if (status is not None or prints_unknown) and rank not in self._reported:
                    self._reported.add(rank)
                    text = describe_killed(rank, status)
                    if text and is_lowest:
                        write_stderr(f"error: {text}")

    def _watch(self) -> None:
        exits = select.poll()
        while True:
            for process in self._find_ranks():
                # It has ended, or Linux is older than 5.3: then poll() times out.
                with contextlib.suppress(OSError):
                    exits.register(os.pidfd_open(process.pid), select.POLLIN)
            # The poll ends as soon as a rank does, usually before its launcher reaps it. Without
            # descriptors it is a pause of a second.
            exits.poll(1000 * POLL_SECONDS)
            self.report_killed()
            if self._deepspeed_has_ended():
                self._on_deepspeed_end()
            if self.exit_statuses():
                time.sleep(POLL_SECONDS / 10)  # the descriptor of an ended process stays readable

    def _deepspeed_has_ended(self) -> bool:
        return self._deepspeed is not None and not is_alive(self._deepspeed)

    def _find_ranks(self) -> list[psutil.Process]:
        """Return those ranks of this machine that have started since the last call."""
        parent = self._environment.parent
        new = list[psutil.Process]()
        if parent is None or self._knows_all_ranks():
            return new
        with contextlib.suppress(psutil.Error):  # the launcher has ended
            for process in parent.children():
                # The child has ended, or is not a rank.
                with contextlib.suppress(psutil.Error, StopIteration):
                    # A launcher has other children, too. A rank is known by the variables that the
                    # launcher gave it.
                    variables = process.environ()
                    rank = next(
                        int(variables[name]) for name in RANK if variables.get(name, "").isdecimal()
                    )
                    if rank != self._environment.rank and rank not in self._ranks:
                        new.append(process)
                        self._error_files[rank] = Path(variables.get("TORCHELASTIC_ERROR_FILE", ""))
                        self._ranks[rank] = process
        return new

    def _knows_all_ranks(self) -> bool:
        return len(self._ranks) + 1 >= (self._environment.local_world or 1)


def _exit_status(process: psutil.Process) -> int | None:
    """Return a zombie's exit status, which psutil reads only for children of this process."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:  # reaped, or there is no /proc
        return None
    fields = stat[
        stat.rindex(")") + 2 :
    ].split()  # from `state` on (proc_pid_stat(5)); the name may contain blanks
    return (
        os.waitstatus_to_exitcode(int(fields[49]))
        if fields[0] == "Z" and process.is_running()
        else None
    )


def describe_killed(rank: int, status: int | None) -> str:
    """Return a message about an ended rank of this machine.

    For example `rank 1 (node2) was killed by SIGKILL; out of memory?`.

    It is "" for a rank that exited by itself, or that the launcher's SIGTERM or SIGINT ended before
    it handled signals.
    """
    if status is None:
        return (
            f"{rank_name(rank)} has ended; if it printed no error, it was killed (out of memory?)"
        )
    # A rank that exits has printed its own reason. SIGTERM and SIGINT come from the launcher or a
    # person.
    if status >= 0 or -status in (signal.SIGINT, signal.SIGTERM):
        return ""
    name = signal.Signals(-status).name
    return (
        f"{rank_name(rank)} was killed by {name}{'; out of memory?' if name == 'SIGKILL' else ''}"
    )
