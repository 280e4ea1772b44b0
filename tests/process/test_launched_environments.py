"""What launchers' variables say of a rank: none is guessed."""

from __future__ import annotations

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


@pytest.mark.parametrize("variables", [DEEPSPEED, TORCHRUN, MPIRUN, {**SLURM, **TORCHRUN}, {**SLURM, **DEEPSPEED}])
def test_a_rank_has_its_launchers_numbers(variables: dict[str, str]) -> None:
    """srun may start a launcher on each machine, whose numbers then count."""
    rank = RankEnvironment.of_this_process(variables)
    assert (rank.rank, rank.world, rank.local_rank, rank.local_world) == (5, 8, 1, 4)
    assert rank.several_nodes
    alone = {**variables, "WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "4"}
    assert not RankEnvironment.of_this_process(alone).several_nodes


def test_a_task_of_srun() -> None:
    task = RankEnvironment.of_this_process(SLURM)
    assert (task.rank, task.world, task.local_rank, task.local_world) == (3, 5, 1, 2)
    # A shell between that names the ranks for torch.
    named = {**SLURM, "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"}
    assert RankEnvironment.of_this_process(named) == task


def test_a_batch_script_is_no_task() -> None:
    """sbatch sets most of them for the script too, which runs once."""
    script = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "12"}
    alone = RankEnvironment.of_this_process(script)
    assert (alone.rank, alone.world, alone.local_rank) == (0, 1, None)


def test_without_a_word_there_is_no_local_rank() -> None:
    by_hand = RankEnvironment.of_this_process({"RANK": "1", "WORLD_SIZE": "2"})
    assert (by_hand.rank, by_hand.world, by_hand.local_rank, by_hand.several_nodes) == (1, 2, None, False)
