"""A rank's place in its job, read from the launcher's variables. It imports no torch, so it is there at once."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from zero_tp.errors import UserError
from zero_tp.process.job_store import AGENT_STORE, JobStore

RUNNER_NAMES = ("deepspeed", "deepspeed.pt", "ds", "runner.py", "deepspeed.launcher.runner")

# Names under deepspeed, torchrun and accelerate, then OpenMPI's mpirun, then srun. The process that started a rank
# comes before the one above it: srun may start torchrun.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class RankEnvironment:
    """Place of this process in its job, under deepspeed, torchrun, accelerate, srun, mpirun or alone.

    Attributes:
        local_rank, local_world: None where the launcher sets neither.
        parent: the launcher. None for a process that someone started alone: it may outlive its shell (`nohup`).
    """

    rank: int
    world: int
    local_rank: int | None
    local_world: int | None
    parent: psutil.Process | None = None

    @staticmethod
    def of_this_process(variables: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read the variables and look at the process above this one."""
        if "SLURM_STEP_NUM_TASKS" not in variables:  # no task of srun's: in a batch script the others are set too
            variables = {name: value for name, value in variables.items() if not name.startswith("SLURM_")}
        world = _number(variables, WORLD) or 1
        rank = _number(variables, RANK)
        by_launcher = _number(variables, LOCAL_RANK[:2]) is not None
        launched = by_launcher or (world > 1 and rank is not None)
        slurm = (variables.get("SLURM_PROCID"), variables.get("SLURM_STEP_NUM_TASKS")) == (str(rank), str(world))
        slurm_ranks = [number for number in variables.get("SLURM_GTIDS", "").split(",") if number] if slurm else []
        return RankEnvironment(
            rank=(rank or 0) if launched else 0,
            world=world if launched else 1,
            local_rank=_number(variables, LOCAL_RANK),
            local_world=_number(variables, LOCAL_WORLD) or len(slurm_ranks) or None,
            parent=psutil.Process().parent() if launched else None,
        )

    @property
    def is_local_rank_zero(self) -> bool:
        return self.local_rank in (None, 0)

    @property
    def several_nodes(self) -> bool:
        """Whether the launcher's numbers show that the job has ranks on other machines."""
        return self.local_world is not None and self.local_world < self.world

    @property
    def name(self) -> str:
        return rank_name(self.rank)

    @cached_property
    def store(self) -> JobStore:
        """The store where the job's ranks meet before they have a process group."""
        return JobStore(self.rank, self.world, self.several_nodes)

    def export(self) -> None:
        """Set the variables that torch reads: Slurm names ranks its own way, and a process alone has no launcher.

        Raises:
            UserError: several ranks have no address to meet at, or torchrun's restarts would reuse an old store.
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

    def runner(self) -> psutil.Process | None:
        """Return the `deepspeed` command above DeepSpeed's launch.py, where those two started this rank."""
        with contextlib.suppress(psutil.Error):  # gone, or hidden from this user
            if self.parent is not None and "deepspeed.launcher.launch" in self.parent.cmdline():
                above = self.parent.parent()
                if above is not None and any(Path(word).name in RUNNER_NAMES for word in above.cmdline()[:4]):
                    return above
        return None


def _number(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((int(variables[name]) for name in names if variables.get(name, "").isdecimal()), None)


def rank_name(rank: int) -> str:
    """Return a rank of this machine as messages name it: `rank 3 (node2)`."""
    return f"rank {rank} ({socket.gethostname()})"


def free_port() -> int:
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` still runs: not a zombie, nor another one with its pid."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
