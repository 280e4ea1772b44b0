"""What ranks do before they connect: lock files of torch's extension builds that nobody holds go, devices
are taken, freed memory is kept, and what has to be compiled is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launched import ROOT
from tests.tiers import in_tiers
from zero_tp.config.optimizer import builder_name, choose_implementation
from zero_tp.errors import UserError
from zero_tp.process import connect
from zero_tp.process.environment import RankEnvironment
from zero_tp.zero import ops


def lock_in(root: Path, op: str) -> Path:
    lock = root / "py311_cpu" / op / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    return lock


def test_only_a_lock_that_no_process_holds_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    left, held = lock_in(tmp_path, "cpu_adam"), lock_in(tmp_path, "fused_adam")
    with held.open():
        ops.clear_abandoned_locks(0.0)
        assert not left.exists() and held.exists()
    ops.clear_abandoned_locks(0.0)
    assert not held.exists()


def test_a_lock_of_another_container_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes can't be seen here, and neither can what they have open."""
    monkeypatch.setattr(ops, "_open_files", lambda: set())
    lock = lock_in(tmp_path, "cpu_adam")
    with lock.open():
        assert list(ops.abandoned_locks(tmp_path, seconds=-1.0)) == []
    assert list(ops.abandoned_locks(tmp_path, seconds=-1.0)) == [lock]
    lock.unlink()
    lock.symlink_to(tmp_path / "another")
    assert list(ops.abandoned_locks(tmp_path, seconds=-1.0)) == []


def test_another_machine_may_hold_a_young_one(tmp_path: Path) -> None:
    lock = lock_in(tmp_path, "cpu_adam")
    assert list(ops.abandoned_locks(tmp_path)) == []
    assert list(ops.abandoned_locks(tmp_path, seconds=-1.0)) == [lock]


def test_init_distributed_compiles_nothing() -> None:
    """DeepSpeed builds its shared-memory collectives unless this table says that they don't work here."""
    import importlib
    import inspect

    import deepspeed

    backend = importlib.import_module("deepspeed.comm.torch")

    ops.without_shared_memory_collectives()
    assert backend.build_shm_op() is None
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    assert "__compatible_ops__" in inspect.getsource(backend.build_shm_op)


def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    second = RankEnvironment(rank=1, world=2, node=0, local_rank=1, local_world=2, parent=None, job="")
    with pytest.raises(UserError, match="local rank 1 has no cuda device: this machine has 1"):
        connect.connect(second, "cuda")


@pytest.mark.parametrize(
    ("tensor", "stage", "before", "after"),
    [(2, 0, None, "1"), (2, 2, None, "1"), (2, 1, "8", "8"), (2, 3, None, None), (1, 1, None, None)],
)
def test_collectives_of_tp_begin_before_the_products_that_hide_them(
    tensor: int, stage: int, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, before or "")
    if before is None:
        monkeypatch.delenv(name)
    connect.order_launches(tensor, stage)
    assert os.environ.get(name) == after


FAULTS = """
import resource, sys, torch
from concurrent.futures import ThreadPoolExecutor
from zero_tp.process.heap import can_keep_freed_memory, keep_freed_memory
print(can_keep_freed_memory())
if sys.argv[1] == "keep":
    keep_freed_memory()
threads, make = ThreadPoolExecutor(1), lambda: torch.ones(2**24).add_(1).sum()
for turn in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (threads.submit(make).result if sys.argv[2] == "thread" else make)()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


KEPT: list[tuple[str, str, dict[str, str], bool, bool]] = [
    ("keep", "main", {}, True, True),
    ("keep", "thread", {}, True, True),
    ("leave", "main", {}, True, False),
    ("leave", "thread", {}, True, False),
    ("keep", "main", {"MALLOC_MMAP_THRESHOLD_": "131072"}, False, False),
    ("keep", "main", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False, False),
]


@pytest.mark.parametrize(("word", "where", "variables", "can", "kept"), in_tiers(KEPT, [KEPT[1], KEPT[3], KEPT[4]]))
def test_freed_memory_is_kept_unless_the_environment_says_how(
    word: str, where: str, variables: dict[str, str], can: bool, kept: bool
) -> None:
    """A tensor of 64 MiB, made and freed again and again, has 16,384 pages. In a thread it is larger than the heap.

    Small blocks may take an end of what was freed, and then the next tensor no longer fits there: up to five of the
    first tensors had fresh pages in twenty processes, none after them.
    """
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    words = [sys.executable, "-c", FAULTS, word, where]
    done = subprocess.run(words, cwd=ROOT, env=bare | variables, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert (said == "True") == can
    assert (int(faults) < 1000) == kept


OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("kind", "params", "zero", "name"),
    [
        ("AdamW", {}, {"stage": 3}, None),
        ("Adam", {}, {"stage": 1, "offload_optimizer": {"device": "none"}}, None),
        ("AdamW", {"torch_adam": False}, {}, "FusedAdamBuilder"),
        ("AdamW", {"bias_correction": True}, {}, "FusedAdamBuilder"),
        ("adamw", {}, OFFLOAD, "CPUAdamBuilder"),
        ("Lion", {}, {}, "FusedLionBuilder"),
        ("Lion", {}, OFFLOAD, "CPULionBuilder"),
        ("Adagrad", {}, {}, None),
        ("Adagrad", {}, OFFLOAD, "CPUAdagradBuilder"),
        ("SGD", {}, {}, None),
    ],
)
def test_what_deepspeed_compiles_is_known(
    kind: str, params: dict[str, Any], zero: dict[str, Any], name: str | None
) -> None:
    config = {"optimizer": {"type": kind, "params": {"lr": 1e-3, **params}}, "zero_optimization": zero}
    choose_implementation(config)
    assert builder_name(config) == name


def test_a_compilation_is_said_and_what_it_lacks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    offloaded = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": OFFLOAD}
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    line = ops.to_compile(offloaded, accelerator)
    assert line == "compiling DeepSpeed's cpu_adam for this machine, once, which takes minutes"
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(UserError, match=r"needs DeepSpeed's cpu_adam, which .* no C\+\+ compiler \(/nowhere/c"):
        ops.to_compile(offloaded, accelerator)
    with pytest.raises(UserError, match=r"DeepSpeed has no Lion for cpu devices; use AdamW"):
        ops.to_compile({"optimizer": {"type": "Lion", "params": {"lr": 1e-3}}}, accelerator)
    assert ops.to_compile({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, accelerator) is None
    monkeypatch.delenv("CXX")
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert ops.to_compile(offloaded, accelerator) is None
