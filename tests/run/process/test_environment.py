"""A rank's numbers are those of its launcher's variables, and libraries get them with its share
of the cores.
"""

from __future__ import annotations

import os

import psutil
import pytest

from zero_tp.run.process.environment import RankEnvironment

SLURM = {
    **{"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_LOCALID": "1"},
    **{"SLURM_GTIDS": "1,3", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0"},
}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
LAUNCHERS = (DEEPSPEED, TORCHRUN, MPIRUN, {**SLURM, **TORCHRUN}, {**SLURM, **DEEPSPEED})
"""srun may start a launcher on each machine, whose numbers then count."""
ONE_NODE = {"WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}
BATCH = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "0",
    "SLURM_JOB_ID": "12",
}


@pytest.mark.parametrize(
    ("variables", "numbers", "is_multi_node"),
    [
        *((launcher, (5, 8, 1, 4), True) for launcher in LAUNCHERS),
        *(({**launcher, **ONE_NODE}, (5, 4, 1, 4), False) for launcher in LAUNCHERS),
        (SLURM, (3, 5, 1, 2), True),
        # A shell between srun and the rank that sets torch's variables.
        ({**SLURM, "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"}, (3, 5, 1, 2), True),
        (BATCH, (0, 1, None, None), False),  # a batch script is not a task
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, None, None), False),
        ({}, (0, 1, None, None), False),
    ],
)
def test_a_rank_has_its_launchers_numbers(
    variables: dict[str, str], numbers: tuple[int | None, ...], is_multi_node: bool
) -> None:
    rank = RankEnvironment.of_this_process(variables)
    assert (rank.rank, rank.world, rank.local_rank, rank.local_world) == numbers
    assert rank.is_multi_node == is_multi_node
    assert (rank.parent.pid if rank.parent else None) == (os.getppid() if numbers[1] != 1 else None)
    assert rank.deepspeed_command() is None


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_NTASKS",
    )
    for name in (*names, "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_launcher")
def test_a_process_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")  # left in the shell, as the next two
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    environment = RankEnvironment.of_this_process()
    assert environment.world == 1
    environment.export()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == (
        "0",
        "1",
        "127.0.0.1",
    )
    assert os.environ["MASTER_PORT"] != "29500"


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    ("machine", "bound", "ranks", "cores", "workers"),
    [
        (16, 16, 8, 2, "2"),
        (4, 4, 8, 1, "1"),
        (192, 192, 2, 96, "32"),
        (16, 2, 8, 2, "2"),
        (16, 1, 8, 1, "1"),
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    machine: int, bound: int, ranks: int, cores: int, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads and compilers of a rank use what its launcher has bound it to, or an equal part."""
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: set(range(bound if pid == 0 else machine))
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    launcher = psutil.Process().parent()
    environment = RankEnvironment(
        rank=0, world=2 * ranks, local_rank=0, local_world=ranks, parent=launcher
    )
    environment.export()
    assert (environment.cores, os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == (cores, workers)
