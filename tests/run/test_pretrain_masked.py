"""A run of the masked objective as a person starts it: prepared, trained, stopped, gone on with
elsewhere, exported.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, MegatronBertForMaskedLM, MegatronBertForPreTraining

from tests.support.launched import metrics_of, pretrain, said, script
from tests.support.tiny_models import CORPUS, bert_fields
from tests.tiers import THOROUGH
from zero_tp.run.config import RunConfig
from zero_tp.run.run_inputs import RunInputs

FIGURES = ("loss", "masked_loss", "masked_accuracy", "sentence_loss", "sentence_accuracy")
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_num_steps": 2,
            "warmup_max_lr": 5e-3,
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {"stage": 2},
    "zero_tp": {
        "model": bert_fields(
            vocab_size=512, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1
        ),
        "objective": "masked",
        "parallel": {"tensor": 2, "sequence": True},
        "data": {"train": "data/train", "validation": "data/validation", "sequence_length": 48},
        "training": {"steps": 6, "seed": 7},
        "evaluation": {"interval": 6, "batches": 1},
    },
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("masked")
    words = (
        "--input",
        str(CORPUS),
        "--tokenizer",
        "wordpiece:512",
        "--split-sentences",
        "en",
        "--output",
        "data",
    )
    prepared = script("launch/prepare_data.py", directory, *words)
    assert prepared.returncode == 0, prepared.stderr
    (directory / "run.json").write_text(json.dumps(CONFIG))
    return directory


def scored(model: Any, run: RunInputs, samples: int) -> dict[str, float]:
    """A plain transformers loop over the first validation samples, as the run takes them."""
    assert run.validation is not None
    (batch,) = run.validation.batches(samples, samples, 0, 1)
    with torch.no_grad():
        names = ("input_ids", "token_type_ids", "attention_mask")
        output = model(**{name: batch[name] for name in names})
    figures = {}
    for figure, logits, labels in (
        ("masked", output["prediction_logits"].flatten(0, 1), batch["labels"].flatten()),
        ("sentence", output["seq_relationship_logits"], batch["next_sentence_label"]),
    ):
        figures[f"{figure}_loss"] = F.cross_entropy(logits, labels).item()
        figures[f"{figure}_accuracy"] = (
            (logits.argmax(1) == labels)[labels != -100].float().mean().item()
        )
    return {"loss": figures["masked_loss"] + figures["sentence_loss"], **figures}


@THOROUGH
def test_a_run_its_checkpoint_elsewhere_and_its_export(place: Path) -> None:
    done = pretrain(4, place, "--deepspeed_config", "run.json")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = said(done.stdout + done.stderr)
    assert lines[0].startswith("megatron-bert: ") and "TP 2 × DP 2, SP, ZeRO-2" in lines[0]
    header = next(line for line in lines if line.split()[:1] == ["step"])
    assert "masked right  sentence right" in header
    records = metrics_of(place / "runs" / "run")
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == list(range(1, 7))
    for record in trained:
        assert record["loss"] == pytest.approx(
            record["masked_loss"] + record["sentence_loss"], rel=1e-6
        )
        assert all(0 <= record[f"{figure}_accuracy"] <= 1 for figure in ("masked", "sentence"))
    assert trained[-1]["masked_loss"] < trained[0]["masked_loss"] - 0.05
    rates = [record["learning_rate"] for record in trained]
    assert rates == pytest.approx([2.5e-3, 5e-3, 3.75e-3, 2.5e-3, 1.25e-3, 0]), "it decays"

    # Without TP, on two ranks, under ZeRO-3, two steps more.
    changes = (
        "parallel.tensor=1",
        "parallel.sequence=false",
        "training.steps=8",
        "evaluation.interval=8",
    )
    words = [word for change in changes for word in ("--set", f"zero_tp.{change}")]
    words += ["--set", "zero_optimization.stage=3", "--set", "gradient_accumulation_steps=2"]
    again = pretrain(2, place, "--deepspeed_config", "run.json", *words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert any(
        line.startswith("resuming step 6 saved at TP 2 × DP 2") for line in said(again.stdout)
    )
    records = metrics_of(place / "runs" / "run")
    validated = {record["step"]: record for record in records if "validation_loss" in record}
    assert set(validated) == {6, 8}

    exported = script("launch/convert.py", place, "to-hf", "runs/run", "--output", "export")
    assert exported.returncode == 0, exported.stderr
    model: Any = MegatronBertForPreTraining.from_pretrained(place / "export").eval()
    config = RunConfig.load(place / "run.json", (), 4)
    data = {"train": str(place / "data/train"), "validation": str(place / "data/validation")}
    overrides = [f"zero_tp.data.{name}={prefix}" for name, prefix in data.items()]
    run = RunInputs(RunConfig.load(place / "run.json", overrides, 4), place / "none")
    expected = scored(model, run, config.global_batch)
    assert {name: validated[8][f"validation_{name}"] for name in FIGURES} == pytest.approx(
        expected, rel=1e-4
    )
    assert AutoTokenizer.from_pretrained(place / "export").mask_token == "[MASK]"


@pytest.mark.heavy
def test_without_sentences_there_is_no_such_head(place: Path) -> None:
    objective = {"type": "masked", "sentence_order": False}
    words = (
        "--set",
        f"zero_tp.objective={json.dumps(objective)}",
        "--set",
        "zero_tp.training.steps=3",
    )
    done = pretrain(2, place, "--deepspeed_config", "run.json", "--output-dir", "words", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    record, *_ = [record for record in metrics_of(place / "words") if "loss" in record]
    assert "masked_accuracy" in record and not {"sentence_accuracy", "masked_loss"} & record.keys()
    exported = script("launch/convert.py", place, "to-hf", "words", "--output", "export-words")
    assert exported.returncode == 0, exported.stderr
    both: Any = MegatronBertForMaskedLM.from_pretrained(
        place / "export-words", output_loading_info=True
    )
    loading = both[1]
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
