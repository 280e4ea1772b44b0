"""The variables that a rank exports for the libraries: its place, and its share of the cores."""

from __future__ import annotations

import os

import pytest

from zero_tp.process.environment import RankEnvironment


def test_a_process_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "4")  # left in the shell
    environment = RankEnvironment.of_this_process()
    assert environment.world == 1
    environment.export()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")


@pytest.mark.parametrize(("cores", "ranks", "expected"), [(16, 8, "2"), (4, 8, "1"), (192, 2, "32")])
def test_ranks_of_a_machine_share_its_cores_when_they_compile(
    cores: int, ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    environment = RankEnvironment(rank=0, world=2 * ranks, local_rank=0, local_world=ranks)
    environment.export()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == expected
