"""A launched run with z-losses: its columns, its validation, and a resume that changes a weight."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.support.experts import fields
from tests.support.launched import metrics_of, pretrain, said
from tests.tiers import THOROUGH

VOCABULARY = 512


def lines_of(directory: Path, steps: int, **values: object) -> list[str]:
    keys = {"zero_tp.training.steps": steps, "zero_tp.evaluation.batches": 1, **values}
    changes = [word for key in keys for word in ("--set", f"{key}={json.dumps(keys[key])}")]
    words = ("--deepspeed_config", "small.json", "--output-dir", "run", *changes)
    done = pretrain(2, directory, *words, launcher="launch.py")
    assert done.returncode == 0, done.stdout + done.stderr
    return said(done.stdout + done.stderr)


@THOROUGH
def test_columns_of_z_losses_and_a_changed_weight(workplace: Path) -> None:
    model = fields("mixtral", vocab_size=VOCABULARY, max_position_embeddings=256)
    common = {"zero_tp.model": model, "zero_tp.training.router_z_loss": 1e-3}
    lines = lines_of(workplace, 2, **common, **{"zero_tp.training.z_loss": 1e-2})
    assert any("  aux loss    z loss  router z loss  " in line for line in lines)
    again = lines_of(workplace, 4, **common, **{"zero_tp.training.z_loss": 2e-2})
    assert "zero_tp.training.z_loss: 0.02, was 0.01 when step 2 was saved" in again
    records = metrics_of(workplace / "run")
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    # At the start all logits are near 0, and the log-sum-exp is the logarithm of their number.
    first, layers = steps[0], model["num_hidden_layers"]
    assert first["z_loss"] == pytest.approx(math.log(VOCABULARY) ** 2, rel=0.05)
    assert first["router_z_loss"] == pytest.approx(layers * math.log(7) ** 2, rel=0.05)
    assert first["loss"] == pytest.approx(math.log(VOCABULARY) + 0.7 * first["aux_loss"], rel=0.05)
    validations = [record for record in records if "validation_loss" in record]
    assert validations and not any("z_loss" in record for record in validations)
