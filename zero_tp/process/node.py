"""A rank watches the processes of its machine: it ends with its launcher, and names other ranks that were killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from zero_tp.errors import write_stderr
from zero_tp.process.environment import RANK, RankEnvironment, is_alive, rank_name

POLL_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def die_with(parent: psutil.Process) -> None:
    """Have the kernel kill this process when its parent ends, even if C code holds the interpreter's lock."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.pid:  # it has ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


class NodeWatch:
    """Watch the other ranks of this machine, which are the launcher's children, and the `deepspeed` command above.

    A rank that is killed prints nothing, so the lowest rank of the machine that is left prints its end.

    Args:
        runner_gone: called in a thread when the `deepspeed` command has ended.
    """

    def __init__(self, environment: RankEnvironment, runner_gone: Callable[[], object]) -> None:
        self._environment, self._runner_gone = environment, runner_gone
        self._runner = environment.runner()
        self._ranks: dict[int, psutil.Process] = {}
        self._error_files: dict[int, str] = {}
        self._ended: dict[int, int | None] = {}
        self._named = set[int]()
        self._naming = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="node watch", daemon=True).start()

    def ended(self) -> dict[int, int | None]:
        """Return the ranks that have ended and how: exit status, minus a signal, or None if nobody saw it.

        Only a zombie tells, and launchers reap theirs within a second.
        """
        for rank, process in list(self._ranks.items()):
            if rank not in self._ended and not is_alive(process):
                self._ended.setdefault(rank, _exit_status(process))
        return dict(self._ended)

    def unexplained(self) -> list[int]:
        """Return the ranks of which nobody saw how they ended, and which have left torchrun no error file.

        None if the `deepspeed` command has ended, because they end with it.
        """
        ended = {} if self._runner_has_ended() else self.ended()
        return [
            rank for rank, status in ended.items() if status is None and not Path(self._error_files[rank]).is_file()
        ]

    def all_running(self) -> bool:
        """Return whether all ranks of this machine have been found, and none has ended."""
        return self._knows_all_ranks() and not self.ended()

    def is_lowest(self) -> bool:
        """Return whether this rank is the lowest one of this machine that has not ended."""
        ended = self.ended()
        return all(rank in ended or rank > self._environment.rank for rank in list(self._ranks))

    def _watch(self) -> None:
        exits = select.poll()
        while True:
            for process in self._find_ranks():
                with contextlib.suppress(OSError):  # it has ended, or Linux is older than 5.3: then polling has to do
                    exits.register(os.pidfd_open(process.pid), select.POLLIN)
            for descriptor, _ in exits.poll(1000 * POLL_SECONDS):
                exits.unregister(descriptor)
                os.close(descriptor)
            self.name_killed()
            if self._runner_has_ended():
                self._runner_gone()

    def _runner_has_ended(self) -> bool:
        return self._runner is not None and not is_alive(self._runner)

    def _find_ranks(self) -> list[psutil.Process]:
        """Return ranks of this machine that are new; none, once all have been found."""
        parent, own = self._environment.parent, self._environment.rank
        if parent is None or self._knows_all_ranks():
            return []
        new = []
        with contextlib.suppress(psutil.Error):  # the launcher is gone
            for process in parent.children():
                with contextlib.suppress(psutil.Error, StopIteration):  # it has ended, or is no rank
                    variables = process.environ()
                    rank = next(int(variables[name]) for name in RANK if variables.get(name, "").isdecimal())
                    if rank != own and rank not in self._ranks:
                        new.append(process)
                        self._error_files[rank] = variables.get(_ERROR_FILE, "")
                        self._ranks[rank] = process
        return new

    def _knows_all_ranks(self) -> bool:
        return len(self._ranks) + 1 >= (self._environment.local_world or 1)

    def name_killed(self) -> None:
        """Print the ranks that were killed, once each. The main thread calls it before it ends this process."""
        with self._naming:  # until the line is written
            for rank, status in self.ended().items():
                if rank not in self._named and status is not None and status < 0:
                    self._named.add(rank)
                    # A launcher's own signals, before the rank could handle them.
                    if -status not in (signal.SIGINT, signal.SIGTERM) and self.is_lowest():
                        write_stderr(f"error: {describe_killed(rank, -status)}")


def _exit_status(process: psutil.Process) -> int | None:
    """Return the status that a zombie keeps for its parent; psutil has only that of our own children."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:  # reaped, or there is no /proc
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # from `state` on (proc_pid_stat(5)); the name may hold blanks
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[0] == "Z" and process.is_running() else None


def describe_killed(rank: int, number: int) -> str:
    """Return the end of a rank of this machine: `rank 1 (node2) was killed by SIGKILL; out of memory?`."""
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return f"{rank_name(rank)} was killed by {name}{'; out of memory?' if name == 'SIGKILL' else ''}"
