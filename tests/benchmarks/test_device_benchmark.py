"""The benchmarks for accelerators run their own code at tiny sizes on CPU, and write what they measured."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.device import ITEMS
from benchmarks.device_rank import replace
from tests.support.launched import launch, run
from tests.tiers import THOROUGH

DEVICE = [sys.executable, "-m", "benchmarks.device"]


def written(directory: Path, pattern: str) -> dict[str, Any]:
    (file,) = directory.glob(pattern)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@THOROUGH
def test_the_rows_of_one_device(tmp_path: Path) -> None:
    words = ["--tiny", "--rows", "1.3b", "3b-recomputed", "--items", "--steps", "2", "--output", str(tmp_path)]
    done = run([*DEVICE, *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    plain, recomputed = written(tmp_path, "*-device-tiny.json")["runs"]
    assert [each["changes"] for each in (plain, recomputed)] == [[], ["zero_tp.recompute=full"]]
    for each in (plain, recomputed):
        assert len(each["tokens_per_second"]) == len(each["mfu"]) == 2
        for rate, mfu in zip(each["tokens_per_second"], each["mfu"], strict=True):
            assert mfu == pytest.approx(each["flops_per_step"] * rate / (2 * 64) / each["peak_flops"])
        assert each["device"] == "cpu" and each["peak_gib"] > 0
    assert recomputed["losses"] == plain["losses"]
    assert 0 < recomputed["planned_gib"] < plain["planned_gib"]
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["1.3b", "3b-recomputed"]


@THOROUGH
def test_the_items_of_two_devices(tmp_path: Path) -> None:
    """What a switch changes trains the same model; two replicas do twice the work."""
    items = ["one-product-after-the-gather", "replicas", "replicas-reduced-to-owners"]
    words = ["--tiny", "--ranks", "2", "--rows", "1.3b", "--items", *items, "--steps", "1", "--output", str(tmp_path)]
    done = run([*DEVICE, *words], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, after, replicas, owners = written(tmp_path, "*-device-tiny.json")["runs"]
    assert after["changes"] == ["zero_tp.parallel.linear.OWN_ROWS_FIRST=false"]
    assert after["losses"] == pytest.approx(first["losses"], rel=1e-3)
    assert owners["losses"] == pytest.approx(replicas["losses"], rel=1e-3)
    assert replicas["flops_per_step"] == owners["flops_per_step"] == 2 * first["flops_per_step"]


def test_the_constants_of_items_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = [constant for item in ITEMS.values() for constant in item.constants]
    assert constants
    for constant in constants:
        path, value = constant.split("=")
        module, _, name = path.rpartition(".")
        before = getattr(importlib.import_module(module), name)
        monkeypatch.setattr(path, before)  # which puts it back
        replace(path, value)
        now = getattr(importlib.import_module(module), name)
        assert now == json.loads(value) != before and type(now) is type(before)


@THOROUGH
def test_a_row_that_fails_says_so_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")  # torch finds no compiler
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    words = ["--tiny", "--rows", "1.3b", "--items", "not-compiled", "--steps", "1", "--output", str(tmp_path)]
    done = run([*DEVICE, *words], tmp_path)
    assert done.returncode == 1
    assert done.stderr.endswith("failed: 1.3b\n")
    failed, uncompiled = written(tmp_path, "*-device-tiny.json")["runs"]
    assert "zero_tp.compile: torch can't compile for cpu here" in failed["failed"]
    assert failed["failed"] in done.stdout
    assert uncompiled["item"] == "not-compiled" and len(uncompiled["tokens_per_second"]) == 1


@THOROUGH
def test_without_an_accelerator_it_is_refused(tmp_path: Path) -> None:
    done = run(DEVICE, tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("there is no accelerator here; --tiny runs the same code on CPU")


@THOROUGH
def test_recomputation_on_two_ranks(tmp_path: Path) -> None:
    sizes = ["--hidden", "64", "--heads", "4", "--sequence", "64", "--batch", "1", "--rounds", "3"]
    command = launch(2, "torchrun", "benchmarks/recompute.py")
    command[-1:] = ["-m", "benchmarks.recompute"]
    done = run([*command, *sizes, "--output", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = written(tmp_path, "*-recompute-cpu.json")
    assert result["layer"] == {"s": 64, "b": 1, "h": 64, "a": 4, "t": 2}
    for name, row in result["rows"].items():
        low, middle, high = row["quartiles_of_overhead"]
        assert low <= middle <= high and min(row["median_seconds"].values()) > 0
        assert name in done.stdout
    added = {name: row["added_flops"] for name, row in result["rows"].items()}
    assert added.pop(next(iter(added))) == 0 < max(added.values())
