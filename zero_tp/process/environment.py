"""This module tells a rank who it is: by its launcher's variables, the launchers above it and the ranks beside it.

It imports no torch: it is used before the libraries are loaded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from zero_tp.errors import UserError
from zero_tp.machine import stat_fields

RUNNER_NAMES = ("deepspeed", "deepspeed.pt", "ds", "runner.py", "deepspeed.launcher.runner")
LAUNCH_NAMES = ("launch.py", "deepspeed.launcher.launch")
ACCELERATE_NAMES = ("accelerate", "accelerate-launch", "accelerate.commands.launch")

RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
NODE = ("CROSS_RANK", "GROUP_RANK", "SLURM_NODEID")
"""What launchers call it: deepspeed, torchrun and accelerate, then OpenMPI's mpirun, then srun. What started a rank
itself comes before what started that."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether torchrun's agent, and not rank 0, has the store where ranks meet."""


@dataclass(frozen=True)
class RankEnvironment:
    """A rank's environment is what deepspeed, torchrun, accelerate, srun and mpirun say of it through variables.

    Attributes:
        local_rank, local_world: None where the launcher doesn't say.
        parent: the launcher. None for a process that someone started alone: it may outlive its shell (`nohup`).
        job: names this launch on this machine; equal on all its ranks.
        node_ranks: those of this machine, where the launcher lists them: srun may deal them out in any way.
    """

    rank: int
    world: int
    node: int
    local_rank: int | None
    local_world: int | None
    parent: psutil.Process | None
    job: str
    node_ranks: tuple[int, ...] = ()

    @staticmethod
    def of_this_process(variables: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read the variables and look at the process above this one."""

        if "SLURM_STEP_NUM_TASKS" not in variables:  # no task of srun's: in a batch script the others are set too
            variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
        world = _number(variables, WORLD) or 1
        rank = _number(variables, RANK)
        by_launcher = _number(variables, LOCAL_RANK[:2]) is not None
        launched = by_launcher or (world > 1 and rank is not None)
        above = _find(os.getppid())
        # A single process below `accelerate launch` gets no variables that tell.
        parent = above if above and (launched or _runs(above, ACCELERATE_NAMES)) else None
        restart = variables.get("TORCHELASTIC_RESTART_COUNT", variables.get("SLURM_RESTART_COUNT", "0"))
        own = {name: variables.get(name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}
        by_slurm = own == {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": str(world)}
        if not launched:
            job = f"alone-{os.getpid()}"
        elif by_slurm:  # tasks may have a shell of their own between
            job = f"slurm-{variables.get('SLURM_JOB_ID', '')}-{variables.get('SLURM_STEP_ID', '')}-{restart}"
        else:
            # In ticks since the machine started: a time of day would move with the clock between two ranks' starts.
            started = stat_fields(os.getppid())[19:20] or ["0"]
            job = f"{os.getppid()}-{started[0]}-{variables.get('MASTER_PORT', '')}-{restart}"
        node = _number(variables, NODE) or 0
        beside = variables.get("SLURM_GTIDS", "") if by_slurm else ""
        ranks = tuple(int(number) for number in beside.split(",") if number)
        return RankEnvironment(
            rank=(rank or 0) if launched else 0,
            world=world if launched else 1,
            node=node if launched else 0,
            local_rank=_number(variables, LOCAL_RANK),
            local_world=_number(variables, LOCAL_WORLD) or len(ranks) or None,
            parent=parent,
            job=job,
            node_ranks=ranks,
        )

    @property
    def several_nodes(self) -> bool:
        """Whether the launcher says that the job has ranks on other machines."""
        return self.local_world is not None and self.local_world < self.world

    def export(self) -> None:
        """Set the variables that torch reads: Slurm names ranks its own way, and a process alone has no launcher.

        Raises:
            UserError: there are several ranks and nothing says where they meet, or torchrun would let them meet where
                ranks that are gone have met.
        """
        if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ.get(AGENT_STORE) == "True":
            raise UserError(
                "torchrun's --max-restarts: its agents keep one store, in which a restart finds the addresses of ranks "
                "that are gone; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on every machine"
            )
        # Not only where they are unset: a WORLD_SIZE left in a shell would make a process alone wait for ranks.
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world)
        os.environ["LOCAL_RANK"] = str(self.local_rank or 0)
        # By default each rank's torch.compile would start a worker for each of the machine's cores.
        workers = max(1, min(32, len(os.sched_getaffinity(0)) // (self.local_world or self.world)))
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(workers))
        if self.world == 1:
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(free_port()))
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(
                    f"{name} is not set: {self.world} ranks need it to meet; export it before srun, as "
                    "launch/slurm.sbatch does"
                )

    def launchers(self) -> dict[psutil.Process, str]:
        """Return the processes that this rank must not outlive, in words: its parent, and a `deepspeed` above that."""
        if self.parent is None:
            return {}
        if not _runs(self.parent, LAUNCH_NAMES):
            return {self.parent: f"process {self.parent.pid}"}
        found = {self.parent: f"deepspeed's launch.py, process {self.parent.pid}"}
        with contextlib.suppress(psutil.Error):
            runner = self.parent.parent()
            if runner is not None and _runs(runner, RUNNER_NAMES):
                found[runner] = f"deepspeed, process {runner.pid}"
        return found


def _number(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(variables[name]) for name in names if variables.get(name, "").isdecimal()), None)


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_alive(process: psutil.Process) -> bool:
    """Tell whether `process` still runs: not a zombie, nor another one with its pid."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _find(pid: int) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        return process if is_alive(process) else None
    except psutil.Error:  # gone, or hidden from this user
        return None


def _runs(process: psutil.Process, names: tuple[str, ...]) -> bool:
    """Tell whether one of `names` is the script or `-m` module in the command line."""
    try:
        return any(Path(word).name in names for word in process.cmdline()[:4])
    except psutil.Error:  # gone, or another person's
        return False


class Siblings:
    """Siblings are the ranks of this node: the launcher's children, each named by its environment."""

    def __init__(self, environment: RankEnvironment) -> None:
        self.environment = environment
        self.seen: dict[int, psutil.Process] = {}

    @property
    def complete(self) -> bool:
        return self.environment.parent is None or len(self.seen) >= (self.environment.local_world or 1)

    def observe(self) -> None:
        """Remember the ranks that run now: a zombie, which has no environment, can then still be named."""
        if self.environment.parent is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):  # the launcher is gone
            for process in self.environment.parent.children():
                with contextlib.suppress(psutil.Error):
                    rank = _number(process.environ(), RANK)
                    if rank is not None and is_alive(process):
                        self.seen[rank] = process

    def gone(self) -> dict[int, int | None]:
        """Return the ranks of this node that ended, other than with status 0, and how.

        A rank's value is its exit status, or minus the signal that killed it; None when that is unknown.
        """
        own = self.environment
        if own.parent is None:
            return {}
        self.observe()
        expected = set(self.seen) | set(own.node_ranks)
        if not own.node_ranks and own.local_rank is not None and own.local_world is not None:
            first = own.rank - own.local_rank  # deepspeed and torchrun number a node's ranks in a row
            expected |= set(range(first, first + own.local_world))
        ended = {
            rank: _exit_status(self.seen[rank]) if rank in self.seen else None
            for rank in sorted(expected - {own.rank})
            if rank not in self.seen or not is_alive(self.seen[rank])
        }
        return {rank: status for rank, status in ended.items() if status != 0}


def _exit_status(process: psutil.Process) -> int | None:
    """Return the status that a zombie keeps for its parent; psutil knows only that of our own children."""
    fields = stat_fields(process.pid)  # empty: reaped, or there is no /proc
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[:1] == ["Z"] and process.is_running() else None


def describe_end(rank: int, status: int | None) -> str:
    """Return one peer's end in words: `rank 1 ended without a word (killed by SIGKILL: out of memory?)`."""
    if status is None:
        return f"rank {rank} ended without a word (killed, or out of memory?)"
    if status >= 0:
        return f"rank {rank} ended without a word (exit status {status})"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else f"signal {-status}"
    return f"rank {rank} ended without a word (killed by {name}{': out of memory?' if name == 'SIGKILL' else ''})"
