"""Preparations of a rank: its device, DeepSpeed's compiled ops, and directories on NVMe."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.mistakes import Mistake
from zero_tp.base.errors import UserError
from zero_tp.base.settings.optimizer import choose_implementation
from zero_tp.engine.settings.parse import parse_settings
from zero_tp.engine.zero import ops
from zero_tp.run.config import RunConfig
from zero_tp.run.process import connect
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.job_store import JobStore


def test_init_distributed_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed builds its shared-memory collectives unless its table says that they are
    incompatible.

    Filling the whole table probes every op, and prints such lines on each rank of a machine with a
    GPU.
    """
    import importlib
    import inspect

    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")

    def probe() -> dict[str, bool]:
        print(
            "[WARNING]  evoformer_attn compatibility check failed (CUDA_HOME does not exist), "
            "treating the op as …"
        )
        print(
            "[WARNING]  gds requires the dev libaio .so object and headers but these were not "
            "found."
        )
        return {"deepspeed_shm_comm": True}

    monkeypatch.delitem(vars(deepspeed.ops), "__compatible_ops__", raising=False)
    monkeypatch.setattr(deepspeed.ops, "_probe_compatible_ops", probe)
    ops.disable_shared_memory_collectives()
    assert backend.build_shm_op() is None
    assert capsys.readouterr() == ("", "")
    assert "__compatible_ops__" in inspect.getsource(backend.build_shm_op)


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = RankEnvironment(rank=1, world=2, local_rank=1, local_world=2)
    with pytest.raises(UserError, match="local rank 1 has no cuda device: this machine has 1"):
        connect.connect(second, "cuda")


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("kind", "params", "zero", "name"),
    [
        ("AdamW", {}, {"stage": 3}, None),
        ("Adam", {}, {"stage": 1, "offload_optimizer": {"device": "none"}}, None),
        ("AdamW", {"torch_adam": False}, {}, "FusedAdamBuilder"),
        ("AdamW", {"bias_correction": True}, {}, "FusedAdamBuilder"),
        ("adamw", {}, OFFLOAD, "CPUAdamBuilder"),
        ("SGD", {}, {}, None),
    ],
)
def test_builder_of_an_optimizer(
    kind: str, params: dict[str, Any], zero: dict[str, Any], name: str | None
) -> None:
    config = {
        "optimizer": {"type": kind, "params": {"lr": 1e-3, **params}},
        "zero_optimization": zero,
    }
    choose_implementation(config)
    assert ops.builder_name(parse_settings(config)) == name


def test_a_compilation_is_logged_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    offloaded = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": OFFLOAD,
    }
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    settings = parse_settings(offloaded)
    line = ops.compilation_note(settings, accelerator)
    assert line == "compiling DeepSpeed's cpu_adam for this machine, once, which takes minutes"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(
        UserError, match=r"needs DeepSpeed's cpu_adam, which .* no C\+\+ compiler \(/nowhere/c"
    ):
        ops.compilation_note(settings, accelerator)
    torch_adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    assert ops.compilation_note(parse_settings(torch_adam), accelerator) is None
    monkeypatch.setenv("CXX", 'c++ "')  # an unclosed quotation mark
    with pytest.raises(UserError, match=r'there is no C\+\+ compiler \(c\+\+ ";'):
        ops.compilation_note(settings, accelerator)
    monkeypatch.setenv("CXX", "env c++")  # as "ccache c++"
    assert ops.compilation_note(settings, accelerator) == line
    monkeypatch.delenv("CXX")
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert ops.compilation_note(settings, accelerator) is None


def test_connect_sets_local_rank_to_the_device_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed reads LOCAL_RANK as the index. A rank that sees only its own device has index 0."""

    class Joined(Exception):
        pass

    def join(backend: str, *, timeout: timedelta, device_id: torch.device) -> None:
        assert (device_id, os.environ["LOCAL_RANK"]) == (torch.device("cuda:0"), "0")
        raise Joined

    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(connect, "rank_device", lambda *_: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.setattr(JobStore, "wait_until_all_ready", lambda *_: None)
    environment = RankEnvironment(rank=1, world=2, local_rank=1, local_world=2)
    with pytest.raises(Joined):
        connect.connect(environment, "cuda")


@pytest.mark.parametrize(
    ("block", "directory", "writable", "libaio", "message"),
    [
        ("offload_optimizer", ".", True, True, None),
        ("offload_param", ".", True, True, None),
        ("offload_param", "none", True, True, "nvme_path: .*/none is not a directory"),
        ("offload_optimizer", ".", False, True, "nvme_path: .* that can be written;"),
        ("offload_optimizer", ".", True, False, 'device: .*libaio-dev .*or use "cpu"$'),
        (None, ".", True, None, None),
    ],
    ids=["optimizer", "parameters", "no directory", "read-only", "no libaio", "no NVMe"],
)
def test_check_nvme(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    block: str | None,
    directory: str,
    writable: bool,
    libaio: bool | None,
    message: str | None,
) -> None:
    def has_libaio() -> bool:
        assert libaio is not None, "libaio was looked for"
        return libaio

    monkeypatch.setattr(ops, "has_libaio", has_libaio)
    if not writable:
        monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    path = tmp_path / "run.json"
    offload = {"device": "nvme", "nvme_path": str(tmp_path / directory)}
    changes = {"zero_optimization.stage": 3, f"zero_optimization.{block}": offload} if block else {}
    path.write_text(json.dumps(Mistake(changes, "", ()).config()))
    paths = RunConfig.load(path, world_size=4).nvme_paths
    with (
        nullcontext()
        if message is None
        else pytest.raises(UserError, match=rf"^zero_optimization.{block}.{message}")
    ):
        ops.check_nvme(paths)
