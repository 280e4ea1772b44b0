"""`zero-tp check --explain KEY`: a key's value, where it comes from, what reads it and the rules
about it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launched import ROOT, forked_zero_tp
from zero_tp.run.config import ConfigError, RunConfig
from zero_tp.run.config.explain import READERS, explain

QUICKSTART = ROOT / "ds_configs" / "quickstart.json"
OVERRIDES = ["zero_tp.training.seed=7", "optimizer.params.eps=auto"]


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig.load(QUICKSTART, OVERRIDES, 4)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("zero_tp.checkpoint.keep", {"value": "3", "from": str(QUICKSTART), "default": "3"}),
        ("zero_tp.checkpoint.interval", {"value": "200", "read by": "zero_tp.run.checkpoint"}),
        ("zero_tp.training.seed", {"value": "7", "from": "--set", "default": "1234"}),
        ("optimizer.params.eps", {"value": "1e-08", "from": '"auto" in --set', '"auto"': "1e-8"}),
        ("scheduler.params.total_num_steps", {"value": "601", "from": f'"auto" in {QUICKSTART}'}),
        ("zero_tp.compile", {"value": '"auto"', "from": "the default"}),
        ("zero_tp.parallel.sequence", {"value": "true", "from": str(QUICKSTART)}),
        ("zero_tp.model.rms_norm_eps", {"value": "1e-06", "from": "the default"}),
        ("zero_tp.recompute.mode", {"value": 'part of zero_tp.recompute, which is "none"'}),
        ("zero_tp.training.guard_gradients", {"read by": "zero_tp.engine.guards"}),
        ("zero_tp.evaluation.task_limit", {"value": "null", "read by": "zero_tp.tools.evaluation"}),
        ("zero_optimization.overlap_comm", {"from": "the default", "read by": "DeepSpeed"}),
        ("gradient_predivide_factor", {"value": "1.0", "read by": "DeepSpeed"}),
    ],
)
def test_a_key_is_explained(config: RunConfig, key: str, expected: dict[str, str]) -> None:
    lines = explain(config, OVERRIDES, key).splitlines()
    assert lines[0] == f"key        {key}"
    explained = {line[:10].rstrip(): line[11:] for line in lines}
    assert {name: explained.get(name) for name in expected} == expected


def test_rules_about_a_key_of_deepspeed_are_named(config: RunConfig) -> None:
    lines = explain(config, [], "data_types.grad_accum_dtype").splitlines()
    assert len([line for line in lines if line.startswith("refused ")]) >= 3
    assert "the key is refused" in explain(config, [], "zero_optimization.zeropp_loco_param")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("zero_tp.training.step", "zero_tp.training.steps"),
        ("training.seed", "zero_tp.training.seed"),
        ("zero_optimisation.stage", "zero_optimization.stage"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(
    config: RunConfig, key: str, nearest: str
) -> None:
    with pytest.raises(
        ConfigError, match=f'^{key}: is not a key .*did you mean "{nearest}"'
    ) as caught:
        explain(config, [], key)
    assert "\n" not in str(caught.value)


def test_readers_exist() -> None:
    assert not [module for module in READERS.values() if find_spec(module) is None]


def test_check_explains(tmp_path: Path) -> None:
    done = forked_zero_tp(tmp_path, "check", "quickstart", "--explain", "zero_tp.training.steps")
    assert done.returncode == 0 and "\nread by    zero_tp.run.loop" in done.stdout, done.stderr
