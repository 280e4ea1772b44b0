"""A rank's place in its job, read from the launcher's variables.

Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from zero_tp.base.errors import UserError
from zero_tp.run.process.job_store import AGENT_STORE, JobStore

DEEPSPEED_COMMANDS = ("deepspeed", "deepspeed.pt", "ds", "runner.py", "deepspeed.launcher.runner")

# The variables of deepspeed, torchrun and accelerate, then those of OpenMPI's mpirun, then srun's.
# The first one that is set counts: if srun starts torchrun, torchrun's numbers are those of the
# ranks.
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
LOCAL_WORLD = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class RankEnvironment:
    """Place of this process in its job.

    It may run under deepspeed, torchrun, accelerate, srun, mpirun or without a launcher.

    Attributes:
        local_rank, local_world: None if the launcher sets neither.
        parent: the launcher's process. None without a launcher: such a process may outlive its
            shell (`nohup`).
    """

    rank: int
    world: int
    local_rank: int | None
    local_world: int | None
    parent: psutil.Process | None = None

    @staticmethod
    def of_this_process(variables: Mapping[str, str] = os.environ) -> RankEnvironment:
        """Read the launcher's variables and find the launcher's process."""
        # A batch script is not a task, but has Slurm's other variables.
        if "SLURM_STEP_NUM_TASKS" not in variables:
            variables = {
                name: value for name, value in variables.items() if not name.startswith("SLURM_")
            }
        world = _number(variables, WORLD) or 1
        rank = _number(variables, RANK)
        # Slurm's local rank is no sign of a launcher: a single process in an interactive job has it
        # too.
        has_launcher = _number(variables, LOCAL_RANK[:2]) is not None or (
            world > 1 and rank is not None
        )
        # srun may also start torchrun or deepspeed, whose ranks are not its tasks.
        is_task = [variables.get(name) for name in (RANK[-1], WORLD[-1])] == [str(rank), str(world)]
        local_tasks = (
            [number for number in variables.get("SLURM_GTIDS", "").split(",") if number]
            if is_task
            else []
        )
        return RankEnvironment(
            rank=(rank or 0) if has_launcher else 0,
            world=world if has_launcher else 1,
            local_rank=_number(variables, LOCAL_RANK),
            local_world=_number(variables, LOCAL_WORLD) or len(local_tasks) or None,
            parent=psutil.Process().parent() if has_launcher else None,
        )

    @property
    def is_local_rank_zero(self) -> bool:
        return self.local_rank in (None, 0)

    @property
    def is_multi_node(self) -> bool:
        """Whether the launcher's numbers show that the job has ranks on other machines."""
        return self.local_world is not None and self.local_world < self.world

    @property
    def name(self) -> str:
        return rank_name(self.rank)

    @property
    def cores(self) -> int:
        """CPU cores that this rank may use.

        They are those it is bound to, or an equal part of its launcher's.
        """
        # The affinity and not the number of cores: Slurm and containers bind a job to some of them.
        own = len(os.sched_getaffinity(0))
        launcher = len(os.sched_getaffinity(self.parent.pid)) if self.parent else own
        return max(1, min(own, launcher // (self.local_world or self.world)))

    @cached_property
    def store(self) -> JobStore:
        """The job's store, which ranks use before they have a process group."""
        return JobStore(self.rank, self.world, self.is_multi_node)

    def export(self) -> None:
        """Set the variables that torch reads, which Slurm and a process without a launcher lack.

        Raises:
            UserError: the ranks have no address to meet at, or torchrun's restarts would reuse an
                old store.
        """
        if (
            os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
            and os.environ.get(AGENT_STORE) == "True"
        ):
            raise UserError(
                "torchrun's --max-restarts: restarted ranks would read the addresses of ended "
                "ranks from the agents' "
                "store; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, on every machine"
            )
        # Overwrite them: with a WORLD_SIZE or MASTER_ADDR left over in a shell, a single process
        # would wait for others.
        os.environ["RANK"] = str(self.rank)
        os.environ["WORLD_SIZE"] = str(self.world)
        os.environ["LOCAL_RANK"] = str(self.local_rank or 0)
        # By default each rank's torch.compile would start a worker for each of the machine's cores.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(32, self.cores)))
        if self.world == 1:
            for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", str(free_port()))):
                if self.parent is None or name not in os.environ:
                    os.environ[name] = value
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(
                    f"{name} is not set: {self.world} ranks need it to meet; export it before "
                    "srun, as "
                    "launch/slurm.sbatch does"
                )

    def deepspeed_command(self) -> psutil.Process | None:
        """Return the process of the `deepspeed` command, the parent of launch.py.

        None: DeepSpeed has not started this rank.
        """
        with contextlib.suppress(psutil.Error):  # it has ended, or belongs to another user
            if self.parent is not None and "deepspeed.launcher.launch" in self.parent.cmdline():
                # launch.py stays alive if the command is killed, and its ranks with it (tried). So
                # the ranks watch the command themselves.
                command = self.parent.parent()
                if command is not None and any(
                    Path(word).name in DEEPSPEED_COMMANDS for word in command.cmdline()[:4]
                ):
                    return command
        return None


def _number(variables: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next(
        (int(variables[name]) for name in names if variables.get(name, "").isdecimal()), None
    )


def rank_name(rank: int) -> str:
    """Return the name of a rank of this machine in messages: `rank 3 (node2)`."""
    return f"rank {rank} ({socket.gethostname()})"


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as listener:
        # Port 0 asks the kernel for one. It is free again after the block, until torch opens it.
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` runs.

    False for a zombie, and if its pid belongs to another process by now.
    """
    try:
        # psutil compares the start time, so a new process with the same pid is not taken for this
        # one.
        return process.is_running() and process.status() not in (
            psutil.STATUS_ZOMBIE,
            psutil.STATUS_DEAD,
        )
    except psutil.NoSuchProcess:
        return False
