"""Each rank has a device of its own: the one that its launcher says, or the only one that it is shown."""

from __future__ import annotations

import resource

import pytest
import torch

from zero_tp import devices
from zero_tp.errors import UserError
from zero_tp.process import connect
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.job_store import allow_connections


def rank(local_rank: int | None, world: int = 4) -> RankEnvironment:
    return RankEnvironment(rank=3, world=world, local_rank=local_rank, local_world=2)


@pytest.mark.parametrize(
    ("local_rank", "devices", "shown", "expected"),
    [
        (1, 8, "", 1),
        (7, 8, "0,1,2,3,4,5,6,7", 7),
        (1, 1, "GPU-5b0f", 0),  # srun --gpus-per-task=1
        (1, 1, "", "local rank 1 has no cuda device: this machine has 1"),
        (2, 2, "0,1", "local rank 2 has no cuda device: this machine has 2"),
        (None, 8, "", "nothing says which cuda device is rank 3's: .* set LOCAL_RANK"),
    ],
)
def test_the_launcher_says_which(
    local_rank: int | None, devices: int, shown: str, expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            connect.own_device(rank(local_rank), "cuda")
    else:
        assert connect.own_device(rank(local_rank), "cuda").index == expected


def test_a_large_job_has_files_for_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    for limits, world in (((1024, 4096), 8), ((1024, 4096), 512), ((1024, 4096), 4096), ((65536, 65536), 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        allow_connections(world)
    assert set_to == [(1056, 4096), (3072, 4096), (4096, 4096)]


def test_devices_of_a_run_are_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA H100 80GB HBM3 of {device}")
    assert devices.describe_devices(torch.device("cuda", 1), 4) == "4 × NVIDIA H100 80GB HBM3 of cuda:1"
    assert devices.describe_devices(torch.device("cpu"), 2) == "2 × CPU"
