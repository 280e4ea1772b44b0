"""A step with gradients that are not finite changes nothing on a CUDA device, and the next one
trains: `pytest -m cuda tests/cuda`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support.device_runs import DEVICE, require_device, run_processes
from tests.support.matrix import config_of

pytestmark = pytest.mark.cuda


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp32")])
def test_a_nonfinite_step_is_skipped(tmp_path: Path, seed: int, stage: int, dtype: str) -> None:
    require_device()
    cell = ("TP 1", "no SP", f"ZeRO-{stage}", "none", "no offload", "× 3", dtype)
    config = config_of(cell, seed % 1000)
    config["zero_tp"]["compile"] = DEVICE.type == "cuda"
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    output = tmp_path / "steps.pt"
    run_processes([["-m", "tests.cuda.nonfinite_rank", str(path), str(output)]], {})
    first, second, third = torch.load(output, weights_only=False)
    assert [step["skipped"] for step in (first, second, third)] == [False, True, False]
    assert math.isnan(second["norm"]) and math.isfinite(third["norm"])
    assert first["tensors"].keys() == second["tensors"].keys() == third["tensors"].keys()
    for name, before in first["tensors"].items():
        assert before.isfinite().all(), name
        assert torch.equal(second["tensors"][name], before), name
        assert third["tensors"][name].isfinite().all(), name
    changed = [
        name
        for name, before in first["tensors"].items()
        if not torch.equal(third["tensors"][name], before)
    ]
    assert {name.split()[0] for name in changed} >= {"master", "exp_avg", "exp_avg_sq"}
