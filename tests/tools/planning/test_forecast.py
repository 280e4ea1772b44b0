"""The forecast that a run prints is its plan, and leaves the run's process as it was."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import ROOT
from tests.tiers import THOROUGH
from zero_tp.base.constants import in_gib
from zero_tp.base.errors import UserError
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import dryrun, simulated_accelerator
from zero_tp.tools.planning.forecast import MemoryForecast
from zero_tp.tools.planning.memory import rank_memory
from zero_tp.tools.planning.plan import plan
from zero_tp.tools.planning.plan_settings import workload_of

QUICKSTART = ROOT / "ds_configs" / "quickstart.json"


def test_a_cpu_run_prints_its_plan() -> None:
    config = RunConfig.load(QUICKSTART, (), 4)
    peak = plan(config, named_device("cpu", 4)).peak.total
    printed = re.search(r"at most ([\d.]+) GiB", MemoryForecast().describe_plan(config, "cpu"))
    assert printed is not None and in_gib(peak) == printed[1] and float(printed[1]) < 0.2


OF_AN_ACCELERATOR = """
import sys

import torch
from zero_tp.run.config import RunConfig
from zero_tp.parallel.devices import named_device
from zero_tp.tools.planning import dryrun, forecast
from zero_tp.tools.planning.plan import plan
forecast._current_device, forecast.runs_flash = torch.device, lambda _: False  # this machine has none
dryrun.has_real_device = lambda: True
callback = forecast.MemoryForecast()
config = RunConfig.load(sys.argv[1], (), 4)
callback.describe_plan(config, "cuda")
print(callback._planned, plan(config, named_device("a100-40gb", 4)).peak.total, torch._C._get_accelerator())
"""  # noqa: E501


def test_the_new_process_does_not_ask_for_devices_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still see some: not all kinds can be hidden."""
    config = RunConfig.load(QUICKSTART, (), 4)
    expected = rank_memory(config, workload_of(config, cpu=False, varlen=False)).peak
    monkeypatch.setattr(dryrun, "has_real_device", lambda: True)
    monkeypatch.setattr(dryrun, "run_isolated", lambda function, *arguments: function(*arguments))
    assert rank_memory(config, workload_of(config, cpu=False, varlen=False)).peak == expected


def never(_: Any) -> None:
    signal.pause()


def test_a_dry_run_without_a_result_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_accelerator, "TIMEOUT_SECONDS", 0.1)
    with pytest.raises(
        UserError, match=r"had no result in 0.1 s; .* run zero-tp plan where more is free"
    ):
        simulated_accelerator.run_isolated(never, None)


@THOROUGH
def test_a_plan_leaves_a_process_with_an_accelerator_as_it_was(tmp_path: Path) -> None:
    """A simulated device that the process knew would be its accelerator, and no backward on CUDA
    would run.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Has no `if __name__ == "__main__"`, which a new process would need.
    script = tmp_path / "unguarded.py"
    script.write_text(OF_AN_ACCELERATOR)
    done = subprocess.run(
        [sys.executable, script, QUICKSTART], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    forecast, planned, accelerator = done.stdout.split()
    config = RunConfig.load(QUICKSTART, (), 4)
    assert (
        float(forecast)
        == rank_memory(config, workload_of(config, cpu=False, varlen=False)).peak.total
    )
    assert float(planned) == plan(config, named_device("a100-40gb", 4)).peak.total
    assert accelerator == "cpu"
