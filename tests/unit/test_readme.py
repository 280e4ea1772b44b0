"""The README's examples hold: its config loads, its files exist, its commands know the options it gives them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zero_tp.config import RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_config_is_right(tmp_path: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "run.json"
    path.write_text(block)
    config = RunConfig.load(path, world_size=4)
    assert (config.global_batch, config.data_parallel, config.zero_stage, config.dtype) == (16, 2, 2, "bf16")


def test_the_page_on_architectures_shows_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "adding-an-architecture.md").read_text()
    table = (ROOT / "zero_tp" / "models" / "architectures" / "starcoder2.py").read_text()
    pieces = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    assert len(pieces) > 5 and not [piece for piece in pieces if piece not in table]
    named = set(re.findall(r"(?:tests|zero_tp)/[\w./]+\.py", page))
    assert len(named) > 4 and not [name for name in named if not (ROOT / name).exists()]


def test_every_file_that_is_named_exists() -> None:
    named = set(re.findall(r"(?<![\w/])(?:launch|eval|tests|docs|ds_configs|benchmarks)/[\w./-]+\.\w+", README))
    assert {"launch/quickstart.sh", "tests/run.sh", "docs/config.md"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("script", ["prepare_data", "pretrain", "plan", "convert", "zero_shot", "sample"])
def test_the_options_that_are_given_exist(script: str) -> None:
    rows = [line for line in README.splitlines() if f"/{script}.py" in line]
    options = set(re.findall(r"--[a-z_-]+", " ".join(rows))) - {"--num_accelerators"}
    path = next(ROOT.glob(f"*/{script}.py"))
    known = ""
    for words in [["to-hf"], ["inspect"]] if script == "convert" else [[]]:
        done = subprocess.run([sys.executable, str(path), *words, "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        known += done.stdout
    assert options and not [option for option in options if option not in known]
