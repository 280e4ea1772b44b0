"""Plans of the shipped configs."""

from __future__ import annotations

from tests.support.launched import ROOT
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.plan import Plan, plan

CONFIGS = ROOT / "ds_configs"
GPT2 = CONFIGS / "gpt2_355m.json"


def plan_gpt2(*overrides: str, world: int = 8, device: str = "h100") -> Plan:
    return plan(RunConfig.load(GPT2, overrides, world), named_device(device))
