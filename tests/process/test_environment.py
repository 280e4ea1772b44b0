"""A rank's numbers are those of its launcher's variables; none is guessed."""

from __future__ import annotations

import os

import pytest

from zero_tp.process.environment import RankEnvironment

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
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "12"}


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
