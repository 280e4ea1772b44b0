"""QK-clip's keys reach the engine; models whose scores do not follow their weights are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoConfig

from tests.support.mistakes import changed, written
from zero_tp.base.errors import ConfigError
from zero_tp.base.settings.schema import ZeroTP
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.architectures import architecture_of
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.run.config.model_block import check_model
from zero_tp.run.start import _build_engine


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model_type": "qwen3"}, "this model norms Q and K, which undoes"),
        ({"model_type": "olmoe"}, "this model norms Q and K"),
        ({"model_type": "gemma2"}, "this model caps its scores"),
        ({"model_type": "bert"}, "an encoder's rows are padded"),
    ],
)
def test_models_whose_scores_do_not_follow_their_weights(
    fields: dict[str, Any], problem: str
) -> None:
    """A run's file, and the engine before it builds."""
    config = AutoConfig.for_model(**fields, num_hidden_layers=1)
    expected = rf"^zero_tp\.training\.qk_clip_threshold: {problem}"
    settings = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with pytest.raises(ConfigError, match=expected):
        TrainingEngine.from_dict(
            config, Topology(world=1), settings, seed=1, qk_clip_threshold=100.0
        )
    masked = {"objective": "masked"} if fields["model_type"] == "bert" else {}
    block = ZeroTP(
        model={**fields, "num_hidden_layers": 1},
        data={"train": "nowhere", "sequence_length": 8},
        training={"steps": 1, "qk_clip_threshold": 100.0},
        **masked,
    )
    with pytest.raises(ConfigError, match=expected):
        check_model(block)


def test_clipped_queries_are_refused() -> None:
    spec = architecture_of(AutoConfig.for_model("llama")).spec(AutoConfig.for_model("llama"))
    with pytest.raises(ConfigError, match="limits Q and K"):
        replace(spec, clip=1.0).check_qk_clip()


def test_a_run_passes_its_keys_to_the_engine(tmp_path: Path) -> None:
    config = written(tmp_path, changed({"zero_tp.training.qk_clip_threshold": 50.0}))
    inputs: Any = SimpleNamespace(config=RunConfig.load(config, world_size=4), model_config=None)
    with patch("zero_tp.run.start.TrainingEngine") as engine:
        _build_engine(inputs, Topology(world=1), torch.device("cpu"), None, None)
    options = engine.call_args.kwargs
    assert (options["qk_clip_threshold"], options["qk_clip_alpha"]) == (50.0, 0.5)
