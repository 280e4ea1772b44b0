"""A shipped recipe trains through its stages on the shipped corpus; its average is exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.launched import metrics_of, pretrain, script, zero_tp
from tests.support.tiny_models import CORPUS

pytestmark = pytest.mark.thorough


def test_the_small_recipe_trains(tmp_path: Path) -> None:
    words = ("--input", str(CORPUS), "--tokenizer", "bpe:4096", "--output", "data/quickstart")
    prepared = script("launch/prepare_data.py", tmp_path, *words)
    assert prepared.returncode == 0, prepared.stderr
    shorter = ("--set=zero_tp.training.tokens=204800", "--set=zero_tp.evaluation.interval=20")
    words = ("--deepspeed_config", "recipes/wsd_small", "--output-dir", "run", *shorter)
    done = pretrain(2, tmp_path, *words, launcher="torchrun")
    assert done.returncode == 0, done.stderr
    assert "stage main: steps 1 to 72, " in done.stdout
    assert "stage decay: steps 73 to 82, " in done.stdout
    records = metrics_of(tmp_path / "run")
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 82 and losses[-1] < losses[0] - 1.5
    consumed = [record["consumed_tokens"] for record in records if "loss" in record]
    # The batch is 16 samples of 128 tokens until 131,072 have been read.
    assert consumed[0] == 16 * 128 and consumed[-1] - consumed[-2] == 16 * 256
    rates = [record["learning_rate"] for record in records if "loss" in record]
    assert rates[71] == max(rates) and rates[-1] < rates[72]
    validated = [record for record in records if "validation_loss" in record]
    averaged = [record for record in records if "ema/validation_loss" in record]
    assert len(validated) == len(averaged) == 5
    exported = zero_tp(tmp_path, "convert", "to-hf", "run", "--ema", "--output", "average")
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "average" / "config.json").read_text())["model_type"] == "llama"
    inspected = zero_tp(tmp_path, "inspect", "run").stdout
    assert "stage       decay" in inspected
