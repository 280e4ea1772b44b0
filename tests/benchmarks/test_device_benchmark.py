"""The benchmarks for accelerators run their own code at tiny sizes on CPU, and write their
measurements.
"""

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


def measured(directory: Path, pattern: str, *command: str) -> tuple[dict[str, Any], str]:
    """Run a benchmark → the result that it writes, and its output."""
    done = run([*command, "--output", str(directory)], directory)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = directory.glob(pattern)
    return json.loads(file.read_text()), done.stdout


def device_runs(directory: Path, *words: str) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "benchmarks.device", "--tiny", *words]
    result, output = measured(directory, "*-device-tiny.json", *command)
    return result["runs"], output


@THOROUGH
def test_the_rows_of_one_device(tmp_path: Path) -> None:
    rows = ["--rows", "1.3b", "3b-recomputed", "--items", "--steps", "2"]
    (plain, recomputed), output = device_runs(tmp_path, *rows)
    assert [each["changes"] for each in (plain, recomputed)] == [[], ["zero_tp.recompute=full"]]
    for each in (plain, recomputed):
        assert len(each["tokens_per_second"]) == len(each["mfu"]) == 2
        for rate, mfu in zip(each["tokens_per_second"], each["mfu"], strict=True):
            assert mfu == pytest.approx(
                each["flops_per_step"] * rate / (2 * 64) / each["peak_flops"]
            )
        assert each["device"] == "cpu" and each["peak_gib"] > 0
    assert recomputed["losses"] == plain["losses"]
    assert 0 < recomputed["planned_gib"] < plain["planned_gib"]
    assert [line.split()[0] for line in output.splitlines()[1:3]] == ["1.3b", "3b-recomputed"]


@THOROUGH
def test_the_items_of_two_devices(tmp_path: Path) -> None:
    """A switch trains the same model; two replicas do twice the work."""
    items = ["one-product-after-the-gather", "replicas", "replicas-reduced-to-owners"]
    words = ["--ranks", "2", "--rows", "1.3b", "--items", *items, "--steps", "1"]
    (first, after, replicas, owners), _ = device_runs(tmp_path, *words)
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
def test_recomputation_on_two_ranks(tmp_path: Path) -> None:
    sizes = ["--hidden", "64", "--heads", "4", "--sequence", "64", "--batch", "1", "--rounds", "3"]
    command = [*launch(2, "torchrun", "benchmarks/recompute.py")[:-1], "-m", "benchmarks.recompute"]
    result, output = measured(tmp_path, "*-recompute-cpu.json", *command, *sizes)
    assert result["layer"] == {"s": 64, "b": 1, "h": 64, "a": 4, "t": 2}
    for name, row in result["rows"].items():
        low, middle, high = row["quartiles_of_overhead"]
        assert low <= middle <= high and min(row["median_seconds"].values()) > 0
        assert name in output
    added = {name: row["added_flops"] for name, row in result["rows"].items()}
    assert added.pop(next(iter(added))) == 0 < max(added.values())
