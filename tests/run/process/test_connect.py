"""Each rank has a device of its own, also where DeepSpeed uses LOCAL_RANK as the index of the
only visible device.
"""

from __future__ import annotations

import math
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_process_group

from tests.support.asynchronous_accelerator import asynchronous
from tests.support.checkpoint_runs import steps_of, write_config
from tests.support.launched import free_port, run
from tests.support.pools import Pool
from zero_tp.base.errors import UserError
from zero_tp.engine.engine import TrainingEngine
from zero_tp.parallel import devices
from zero_tp.run.config import RunConfig
from zero_tp.run.process import connect as connect_module
from zero_tp.run.process.connect import connect_deepspeed, rank_device
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.job_store import JobStore


@pytest.mark.parametrize(
    ("local_rank", "count", "visible", "expected"),
    [
        (1, 8, "", 1),
        (7, 8, "0,1,2,3,4,5,6,7", 7),
        (1, 1, "GPU-5b0f", 0),  # srun --gpus-per-task=1
        (1, 1, "", "local rank 1 has no cuda device: this machine has 1"),
        (2, 2, "0,1", "local rank 2 has no cuda device: this machine has 2"),
        (None, 8, "", "LOCAL_RANK is not set, so the cuda device of rank 3 is unknown"),
    ],
)
def test_a_rank_has_the_device_of_its_local_rank_or_the_only_visible_one(
    local_rank: int | None,
    count: int,
    visible: str,
    expected: int | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environment = RankEnvironment(rank=3, world=4, local_rank=local_rank, local_world=2)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            rank_device(environment, "cuda")
    else:
        assert rank_device(environment, "cuda").index == expected


@pytest.mark.parametrize(
    ("start", "limit"), [("null", timedelta(days=7)), ("1", timedelta(minutes=1.5))]
)
def test_ranks_wait_for_one_that_reads_a_large_corpus(
    start: str, limit: timedelta, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as a start may take, and not only for the limit of a collective."""
    limits: list[timedelta] = []

    def wait(store: JobStore, limit: timedelta) -> None:
        limits.append(limit)
        raise UserError("no further")

    monkeypatch.setattr(JobStore, "wait_until_all_ready", wait)
    change = f'zero_tp.training.timeout_minutes={{"start": {start}, "step": 2}}'
    config = RunConfig.load(
        write_config(tmp_path / "config.json", 1, "fp32", tensor=1), [change], 2
    )
    with pytest.raises(UserError, match="no further"):
        connect_deepspeed(config, RankEnvironment(0, 2, 0, 2))
    assert limits == [limit]


@pytest.mark.parametrize(
    ("set_to", "stage", "replicas", "dtype", "expected"),
    [
        ("true", 2, 2, "fp32", ["keeps"]),
        ("false", 0, 1, "fp32", []),
        ('"auto"', 0, 2, "fp32", ["returns", "keeps"]),
        ('"auto"', 1, 1, "fp32", ["returns", "keeps"]),
        ('"auto"', 1, 2, "fp32", ["returns"]),
        ('"auto"', 2, 2, "fp32", ["returns"]),
        ('"auto"', 3, 2, "fp32", ["returns", "keeps"]),
        ('"auto"', 0, 2, "bf16", ["keeps small"]),
        ('"auto"', 1, 1, "bf16", ["keeps small"]),
        ('"auto"', 3, 2, "bf16", ["keeps"]),
        ("true", 1, 1, "bf16", ["keeps"]),
        ('"auto"', 2, 2, "bf16", ["returns"]),
    ],
)
def test_a_rank_keeps_freed_memory_as_its_config_says(
    set_to: str,
    stage: int,
    replicas: int,
    dtype: str,
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever it is connected, because benchmarks measure what a run does."""
    calls: list[str] = []

    def keep(*, large: bool) -> None:
        calls.append("keeps" if large else "keeps small")

    monkeypatch.setattr(connect_module, "keep_freed_memory", keep)
    monkeypatch.setattr(connect_module, "let_return_freed_memory", lambda: calls.append("returns"))
    monkeypatch.setattr(connect_module, "connect", lambda *_, **__: calls.append("connected"))
    change = f"zero_tp.training.keep_freed_memory={set_to}"
    path = write_config(tmp_path / "config.json", stage, dtype, tensor=1)
    config = RunConfig.load(path, [change], replicas)
    connect_deepspeed(config, RankEnvironment(0, replicas, 0, replicas))
    assert calls == [*expected, "connected"]


ALONE = """
import os
import torch.distributed as dist
from zero_tp import UserError, connect

topology, device = connect(sequence=True)
print(topology.describe(), device, dist.get_world_size(), dist.get_backend(), os.environ["RANK"])
dist.destroy_process_group()
try:
    connect(tensor=2)
except UserError as error:
    print(error)
"""


def test_a_script_connects_by_one_call(tmp_path: Path) -> None:
    """Also where a shell has left the variables of another job; without TP, as one process has
    no other rank.
    """
    done = run(
        [sys.executable, "-c", ALONE],
        tmp_path,
        variables={"WORLD_SIZE": "4", "MASTER_ADDR": "nowhere"},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "TP 1 × DP 1 cpu 1 gloo 0"
    assert second.startswith("zero_tp.parallel.tensor: "), second


def init_gloo(backend: str, *, device_id: torch.device, **options: Any) -> None:
    """Join the process group: torch without CUDA has no NCCL, and binds no CUDA device."""
    assert (backend, device_id) == ("nccl", torch.device("cuda:0"))
    init_process_group("gloo", **options)


def train_on_the_only_device(
    path: str, port: int, launcher: dict[str, str]
) -> tuple[str, int | None, float]:
    """Connect again, as a new process of `launch/pretrain.py` does, and train a step; this rank
    sees one device.

    Ranks that no one has given a number of threads get an equal part of the cores.

    Returns:
        The device, this rank's number on its machine, and the loss.
    """
    from deepspeed.comm import comm

    rank = dist.get_rank()
    dist.destroy_process_group()
    comm.cdb = None
    variables = {
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": f"GPU-{rank}",
        "LOCAL_RANK": str(rank),
    }
    os.environ.update(
        variables | {name: value.format(rank=rank) for name, value in launcher.items()}
    )
    environment = RankEnvironment(rank=rank, world=2, local_rank=rank, local_world=2)
    environment.export()
    os.environ.pop("OMP_NUM_THREADS", None)
    torch.set_num_threads(2 * environment.cores)
    config = RunConfig.load(path, world_size=2)
    properties = SimpleNamespace(uuid=f"GPU-{rank}")
    with asynchronous(devices=1) as accelerator:
        with (
            mock.patch.object(accelerator, "device_name", lambda index=None: "cuda"),
            mock.patch.object(torch.cuda, "device_count", accelerator.device_count),
            mock.patch.object(torch.cuda, "set_device", accelerator.set_device),
            mock.patch.object(torch.cuda, "get_device_properties", lambda _: properties),
            mock.patch.object(dist, "init_process_group", init_gloo),
        ):
            topology, device = connect_deepspeed(config, environment)
        assert torch.get_num_threads() == environment.cores
        engine = TrainingEngine(config.hf_config(), topology, config.engine_settings, seed=7)
        [(loss, _)] = steps_of(engine, 1, 1)
        return str(device), environment.local_rank, loss


@pytest.mark.parametrize(
    ("stage", "launcher"),
    [(1, {"OMPI_COMM_WORLD_LOCAL_RANK": "{rank}"}), (3, {})],
    ids=["1-mpirun", "3-srun"],
)
def test_ranks_with_one_visible_device_each_train(
    tmp_path: Path, stage: int, launcher: dict[str, str]
) -> None:
    path = write_config(tmp_path / "config.json", stage, "fp32", tensor=1)
    pool = Pool(2)  # not a shared one: its ranks leave their process group
    try:
        (device, first, loss), other = pool.run(
            train_on_the_only_device, str(path), free_port(), launcher
        )
    finally:
        pool.kill()
    assert (device, first) == ("cuda:0", 0) and other == ("cuda:0", 1, loss) and math.isfinite(loss)


def test_devices_of_a_run_are_named_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: f"NVIDIA H100 80GB HBM3 of {device}"
    )
    assert (
        devices.describe_devices(torch.device("cuda", 1), 4)
        == "4 × NVIDIA H100 80GB HBM3 of cuda:1"
    )
    assert devices.describe_devices(torch.device("cpu"), 2) == "2 × CPU"
