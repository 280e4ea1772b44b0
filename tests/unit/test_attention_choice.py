"""`zero_tp.attention` reaches the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.mistakes import RIGHT
from zero_tp.config import RunConfig
from zero_tp.models.attention import CORES, Attention
from zero_tp.models.wrapper import ZeroTPForCausalLM


def cores_of(config: RunConfig) -> set[type]:
    model = ZeroTPForCausalLM(config.hf_config())
    return {type(module.core) for module in model.modules() if isinstance(module, Attention)}


@pytest.mark.parametrize("attention", list(CORES))
def test_the_model_has_the_attention_that_the_file_asks_for(attention: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RIGHT))
    config = RunConfig.load(path, [f"zero_tp.attention={attention}"], world_size=4)
    assert cores_of(config) == {CORES[attention]}


def test_sdpa_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RIGHT))
    assert cores_of(RunConfig.load(path, world_size=4)) == {CORES["sdpa"]}
