"""Which process of a job this is, and what `/proc` says about the launcher above it and the ranks beside it.

Linux only: without `/proc` every look-up answers "unknown" and the lifecycle does without it.
Nothing here imports torch: it is used before the libraries are loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RUNNER_NAMES = ("deepspeed", "deepspeed.pt", "ds", "runner.py", "deepspeed.launcher.runner")
LAUNCH_NAMES = ("launch.py", "deepspeed.launcher.launch")
ACCELERATE_NAMES = ("accelerate", "accelerate-launch", "accelerate.commands.launch")


@dataclass(frozen=True)
class Stat:
    """The fields of `/proc/PID/stat` that are used here."""

    state: str
    parent: int
    started: int  # clock ticks after boot: with the pid it names one process for ever
    wait_status: int  # as waitpid returns it; only of a zombie

    @property
    def alive(self) -> bool:
        return self.state not in "ZXx"


def read_stat(pid: int) -> Stat | None:
    """The state of process `pid`; None when there is none (or no `/proc`)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, which is an answer
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name, in brackets, may hold blanks and brackets
    return Stat(fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


def _zero_separated(pid: int, name: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:  # gone, or another person's
        return []


@dataclass(frozen=True)
class Process:
    """One process, told apart from a later one with the same pid."""

    pid: int
    started: int
    name: str = field(default="", compare=False)

    @staticmethod
    def find(pid: int, name: str = "") -> Process | None:
        stat = read_stat(pid)
        return Process(pid, stat.started, name) if stat is not None and stat.alive else None

    def alive(self) -> bool:
        stat = read_stat(self.pid)
        return stat is not None and stat.started == self.started and stat.alive

    def exit_status(self) -> int | None:
        """Of a zombie: its exit code, or minus the signal that killed it. None when unknown."""
        stat = read_stat(self.pid)
        if stat is None or stat.started != self.started or stat.alive:
            return None
        return os.waitstatus_to_exitcode(stat.wait_status)


def _runs(pid: int, names: tuple[str, ...]) -> bool:
    """Is one of `names` the script or `-m` module in the command line of `pid`?"""
    return any(Path(word).name in names for word in _zero_separated(pid, "cmdline")[:4])


def is_launch(pid: int) -> bool:
    """Is `pid` DeepSpeed's per-node `launch.py`?"""
    return _runs(pid, LAUNCH_NAMES)


@dataclass(frozen=True)
class Place:
    """Where this process stands in its job, by the variables that deepspeed, torchrun, accelerate and srun set.

    A process that someone started alone has no `parent` here: it may outlive the shell above it (`nohup`).
    `local_rank` and `local_world` are None where the launcher doesn't say.
    """

    rank: int
    world: int
    node: int
    local_rank: int | None
    local_world: int | None
    parent: Process | None
    job: str

    @staticmethod
    def of_this_process(environment: Mapping[str, str] = os.environ) -> Place:
        def number(*names: str) -> int | None:
            for name in names:
                if environment.get(name, "").isdecimal():
                    return int(environment[name])
            return None

        world = number("WORLD_SIZE", "SLURM_NTASKS") or 1
        by_launcher = number("LOCAL_RANK") is not None
        launched = by_launcher or (world > 1 and number("RANK", "SLURM_PROCID") is not None)
        # A single process below `accelerate launch` gets no variables that tell.
        watched = launched or _runs(os.getppid(), ACCELERATE_NAMES)
        parent = Process.find(os.getppid()) if watched else None
        restart = environment.get("TORCHELASTIC_RESTART_COUNT", environment.get("SLURM_RESTART_COUNT", "0"))
        if not launched:
            job = f"alone-{os.getpid()}"
        elif not by_launcher and "SLURM_JOB_ID" in environment:  # tasks may have a shell of their own between
            job = f"slurm-{environment['SLURM_JOB_ID']}-{environment.get('SLURM_STEP_ID', '')}-{restart}"
        else:
            started = parent.started if parent else 0
            job = f"{os.getppid()}-{started}-{environment.get('MASTER_PORT', '')}-{restart}"
        return Place(
            rank=(number("RANK", "SLURM_PROCID") or 0) if launched else 0,
            world=world if launched else 1,
            node=(number("CROSS_RANK", "GROUP_RANK", "SLURM_NODEID") or 0) if launched else 0,
            local_rank=number("LOCAL_RANK"),
            local_world=number("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
            parent=parent,
            job=job,
        )

    def ancestors(self) -> list[Process]:
        """The launchers this rank must not outlive: its parent, and above a `launch.py` the `deepspeed` runner."""
        if self.parent is None:
            return []
        if not is_launch(self.parent.pid):
            return [self.parent]
        found = [Process(self.parent.pid, self.parent.started, "deepspeed's launch.py")]
        stat = read_stat(self.parent.pid)
        if stat is not None and _runs(stat.parent, RUNNER_NAMES):
            runner = Process.find(stat.parent, "deepspeed")
            found += [runner] if runner else []
        return found


class Siblings:
    """The ranks of this node: the children of the launcher, each named by `RANK` in its environment."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.seen: dict[int, Process] = {}

    @property
    def complete(self) -> bool:
        return self.place.parent is None or len(self.seen) >= (self.place.local_world or 1)

    def observe(self) -> dict[int, Process]:
        """The ranks alive now, remembered in `seen` so that a zombie, which has no environment, can still be named."""
        alive: dict[int, Process] = {}
        for pid in self._children():
            for variable in _zero_separated(pid, "environ"):
                name, _, value = variable.partition("=")
                if name == "RANK" and value.isdecimal() and (process := Process.find(pid)):
                    alive[int(value)] = process
        self.seen.update(alive)
        return alive

    def _children(self) -> list[int]:
        if self.place.parent is None:
            return []
        pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
        return [pid for pid in pids if (stat := read_stat(pid)) and stat.parent == self.place.parent.pid]

    def gone(self) -> dict[int, int | None]:
        """Ranks of this node that ended, unless with status 0 → their status (see `exit_status`), None if unknown."""
        if self.place.parent is None:
            return {}
        alive = self.observe()
        expected = set(self.seen)
        if self.place.local_rank is not None and self.place.local_world is not None:
            first = self.place.rank - self.place.local_rank  # deepspeed and torchrun number a node's ranks in a row
            expected |= set(range(first, first + self.place.local_world))
        missing = sorted(expected - set(alive) - {self.place.rank})
        status = {rank: self.seen[rank].exit_status() if rank in self.seen else None for rank in missing}
        return {rank: code for rank, code in status.items() if code != 0}


def describe_end(rank: int, status: int | None) -> str:
    """`rank 1 was killed by SIGKILL (out of memory?)`: one peer's end in words."""
    if status is None:
        return f"rank {rank} ended without a word (killed, or out of memory?)"
    if status >= 0:
        return f"rank {rank} ended without a word (exit status {status})"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"rank {rank} ended without a word (killed by {name}{': out of memory?' if name == 'SIGKILL' else ''})"
