"""The forecast that a run prints is its plan, and leaves the run's process as it was."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.support.launched import ROOT
from tests.tiers import THOROUGH
from zero_tp.config import RunConfig
from zero_tp.constants import in_gib
from zero_tp.devices import named_device
from zero_tp.planning.forecast import MemoryForecast
from zero_tp.planning.memory import rank_memory
from zero_tp.planning.plan import plan

QUICKSTART = ROOT / "ds_configs" / "quickstart.json"


def test_a_cpu_run_prints_its_plan() -> None:
    config = RunConfig.load(QUICKSTART, (), 4)
    peak = plan(config, named_device("cpu", 4)).peak.total
    printed = re.search(r"at most ([\d.]+) GiB", MemoryForecast().describe_plan(config, "cpu"))
    assert printed is not None and in_gib(peak) == printed[1] and float(printed[1]) < 0.2


OF_AN_ACCELERATOR = """
import torch
from zero_tp.config import RunConfig
from zero_tp.planning import forecast
forecast._current_device, forecast.runs_varlen = torch.device, lambda _: False  # this machine has none
if __name__ == "__main__":
    callback = forecast.MemoryForecast()
    callback.describe_plan(RunConfig.load("ds_configs/quickstart.json", (), 4), "cuda")
    print(callback._planned, torch._C._get_accelerator())
"""


@THOROUGH
def test_the_forecast_of_an_accelerator_leaves_the_process_as_it_was() -> None:
    """A simulated device that the run's own process knew would be its accelerator from then on."""
    done = subprocess.run([sys.executable, "-c", OF_AN_ACCELERATOR], cwd=ROOT, capture_output=True, text=True)
    planned, accelerator = done.stdout.split()[-2:]
    config = RunConfig.load(QUICKSTART, (), 4)
    assert float(planned) == rank_memory(config, cpu=False, varlen=False).peak.total
    assert accelerator == "cpu"
