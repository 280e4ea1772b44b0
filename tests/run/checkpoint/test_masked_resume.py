"""A run of the masked objective goes on exactly: bit for bit on the same topology, within
rounding on another.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import metrics_of, pretrain
from tests.support.tiny_models import bert_fields, prepared_speeches

pytestmark = pytest.mark.thorough
FIGURES = ("loss", "masked_loss", "masked_accuracy", "sentence_loss", "sentence_accuracy")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked_resume")
    prepared_speeches(folder, "wordpiece:600", 20, 10_000, validation=2)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
        "zero_tp": {
            "model": bert_fields(),
            "objective": "masked",
            "data": {"train": "data/train", "validation": "data/validation", "sequence_length": 48},
            "training": {"steps": 6},
            "evaluation": {"interval": 3, "batches": 2},
        },
    }
    (folder / "run.json").write_text(json.dumps(config))
    return folder


def trained(
    workplace: Path, name: str, steps: int, **settings: Any
) -> dict[tuple[str, int], dict[str, float]]:
    """Train on 2 ranks → the figures of each step and of each validation."""
    words = [
        f"--set=zero_tp.training.steps={steps}",
        *(f"--set={key}={value}" for key, value in settings.items()),
    ]
    done = pretrain(
        2,
        workplace,
        "--deepspeed_config",
        "run.json",
        "--output-dir",
        name,
        *words,
        launcher="torchrun",
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for line in metrics_of(workplace / name):
        kind = "validation_" if "validation_loss" in line else ""
        found[kind, line["step"]] = {figure: line[kind + figure] for figure in FIGURES}
    return found


def test_a_resumed_run_sees_the_same_samples(workplace: Path) -> None:
    straight = trained(workplace, "straight", 6)
    assert {*straight} == {
        *(("", step) for step in range(1, 7)),
        ("validation_", 3),
        ("validation_", 6),
    }
    trained(workplace, "same", 3)
    same = trained(workplace, "same", 6)
    assert same == straight, "bit for bit"
    trained(workplace, "other", 3)
    other = trained(
        workplace,
        "other",
        6,
        **{
            "zero_tp.parallel.tensor": 2,
            "zero_optimization.stage": 3,
            "train_micro_batch_size_per_gpu": 4,
        },
    )
    assert other.keys() == straight.keys()
    for where, figures in straight.items():
        for name, value in figures.items():
            assert math.isclose(other[where][name], value, rel_tol=1e-4, abs_tol=1e-6), (
                where,
                name,
            )
