"""What offload to NVMe needs is checked before DeepSpeed is asked for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.mistakes import Mistake
from zero_tp.config import RunConfig
from zero_tp.errors import UserError
from zero_tp.zero import ops


def paths(tmp_path: Path, block: str, directory: Path) -> dict[str, Path]:
    path = tmp_path / "run.json"
    offload = {"device": "nvme", "nvme_path": str(directory)}
    changes = {"zero_optimization.stage": 3, f"zero_optimization.{block}": offload}
    path.write_text(json.dumps(Mistake(changes, "", ()).config()))
    return RunConfig.load(path, world_size=4).nvme_paths


@pytest.mark.parametrize("block", ["offload_optimizer", "offload_param"])
def test_a_directory_and_libaio_are_enough(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_libaio", lambda: True)
    ops.check_nvme(paths(tmp_path, block, tmp_path))


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^zero_optimization.offload_param.nvme_path: .*/none is not a directory"):
        ops.check_nvme(paths(tmp_path, "offload_param", tmp_path / "none"))


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match=r"^zero_optimization.offload_optimizer.nvme_path: .* that can be written;"):
        ops.check_nvme(paths(tmp_path, "offload_optimizer", tmp_path))


def test_without_libaio_the_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_libaio", lambda: False)
    with pytest.raises(UserError, match=r"^zero_optimization.offload_optimizer.device: .*libaio-dev .*or use \"cpu\"$"):
        ops.check_nvme(paths(tmp_path, "offload_optimizer", tmp_path))


def test_nothing_is_compiled_without_nvme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(Mistake({}, "", ()).config()))

    def never() -> bool:
        raise AssertionError("libaio was looked for")

    monkeypatch.setattr(ops, "has_libaio", never)
    ops.check_nvme(RunConfig.load(path, world_size=4).nvme_paths)
