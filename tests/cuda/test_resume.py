"""A run on a CUDA device that stops and resumes equals one that does not, bit for bit:
`pytest -m cuda tests/cuda`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.device_runs import rank_variables, require_device
from tests.support.launched import ROOT, furnish, metrics_of

pytestmark = pytest.mark.cuda
STEPS = 6
STOP = 3
CHANGES = (
    "zero_tp.parallel.tensor=1",
    'bf16={"enabled": true}',
    f"scheduler.params.total_num_steps={STEPS}",
    "zero_optimization.stage=1",
)


def start(directory: Path, run: str, steps: int) -> subprocess.Popen[str]:
    words = [sys.executable, str(ROOT / "launch" / "pretrain.py")]
    words += ["--deepspeed_config", "small.json", "--output-dir", run]
    changes = [*CHANGES, f"zero_tp.training.steps={steps}"]
    for change in changes:
        words += ["--set", change]
    return subprocess.Popen(
        words,
        cwd=directory,
        env=rank_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process: subprocess.Popen[str]) -> None:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-5000:]


@pytest.mark.timeout(900)
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    require_device()
    furnish(tmp_path)
    whole, stopped = start(tmp_path, "whole", STEPS), start(tmp_path, "stopped", STOP)
    for process in (whole, stopped):
        wait(process)
    wait(start(tmp_path, "stopped", STEPS))
    expected, found = (
        [line for line in metrics_of(tmp_path / run) if "loss" in line]
        for run in ("whole", "stopped")
    )
    assert [line["step"] for line in found] == [*range(1, STEPS + 1)]
    for name in ("loss", "grad_norm", "learning_rate"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
