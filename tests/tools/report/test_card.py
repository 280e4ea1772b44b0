"""Exports carry a card of the run that made them, and can be uploaded."""

from __future__ import annotations

import argparse
import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard

from tests.support.checkpoints import KINDS, rewritten, write_checkpoint
from tests.support.tiny_models import tiny_gpt2_config
from zero_tp.base.errors import UserError
from zero_tp.commands import convert
from zero_tp.run.checkpoint.convert import to_huggingface

FIXED: dict[str, Any] = {
    "train_batch_size": 8,
    "zero_tp.data.sequence_length": 16,
    "zero_tp.data.train": [["/home/somebody/data/sotu/train", 1.0]],
    "zero_tp.training.seed": 7,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "betas": [0.9, 0.95]}},
}


def run(directory: Path, **options: Any) -> Path:
    """A run at step 20 that has logged up to step 30."""
    with rewritten(
        write_checkpoint(directory, tiny_gpt2_config(), tensor=2, data=2, step=20, **options)
    ) as manifest:
        manifest["fixed"] = FIXED
    lines = [
        {"step": 10, "loss": 4.0, "validation_loss": 4.5},
        {"step": 20, "loss": 3.0},
        {"step": 30, "loss": 2.0},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def export(source: Path, output: Path, **options: Any) -> Path:
    words = {
        "action": "to-hf",
        "ema": False,
        "dtype": "fp32",
        "tokenizer": None,
        "max_shard_size": "5GB",
        "overwrite": False,
        "push": None,
    }
    convert.export(argparse.Namespace(source=source, output=output, **words | options))
    return output


def test_a_card_tells_of_its_run(tmp_path: Path) -> None:
    text = (export(run(tmp_path / "small"), tmp_path / "export") / "README.md").read_text()
    card: Any = ModelCard(text)
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    for fact in (
        "# small",
        "| trained | 20 steps of 8 × 16 tokens: 2,560 tokens |",
        "| corpora | sotu/train (weight 1) |",
        "| optimizer | AdamW lr 0.001, betas [0.9, 0.95] |",
        "| ranks | TP 2 × DP 2, SP, ZeRO-2, fp32 |",
        "| losses | loss 3.0000 at step 20, validation loss 4.5000 at step 10 |",
    ):
        assert fact in text, text
    assert "somebody" not in text


def test_a_card_of_what_is_not_known_leaves_it_out(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", tiny_gpt2_config())
    text = (export(tmp_path / "run", tmp_path / "export") / "README.md").read_text()
    assert "| trained | 1 steps |" in text and "losses" not in text and "| optimizer" not in text


def test_a_card_names_the_average(tmp_path: Path) -> None:
    """The losses are those of the run's own weights."""
    source = run(tmp_path / "run", kinds=(*KINDS, "ema"))
    write_checkpoint(source, tiny_gpt2_config(), step=1000)
    averaged: dict[str, Any] = {"source": source / "checkpoints" / "step_00000020", "ema": True}
    mean: dict[str, Any] = {
        "source": source,
        "action": "average",
        "steps": [1000, 20],
        "weights": [3.0, 1.0],
    }
    for words, weights in (
        (averaged, "moving average of the weights, decay 0.999"),
        (mean, "mean of the steps 1,000 (0.75), 20 (0.25)"),
    ):
        text = (export(output=tmp_path / str(len(words)), **words) / "README.md").read_text()
        assert f"| weights | {weights} |" in text
        assert "losses" not in text or "| losses before averaging | loss" in text


def test_a_persons_card_stays(tmp_path: Path) -> None:
    source, output = run(tmp_path / "run"), tmp_path / "export"
    first = (export(source, output) / "README.md").read_text()
    write_checkpoint(source, tiny_gpt2_config(), step=21)
    second = (export(source, output, overwrite=True) / "README.md").read_text()
    assert "20 steps" in first and "21 steps" in second
    for own in (second.replace("# run", "# My model"), "# My model\n"):
        (output / "README.md").write_text(own)
        assert (export(source, output, overwrite=True) / "README.md").read_text() == own


def test_the_library_writes_no_card_unless_asked(tmp_path: Path) -> None:
    to_huggingface(run(tmp_path / "run"), tmp_path / "export")
    assert not (tmp_path / "export" / "README.md").exists()


def test_a_model_is_uploaded_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[Any, ...]] = []

    class Address(str):
        repo_id = "somebody/small"

    def create(api: HfApi, name: str, *, private: bool, exist_ok: bool) -> Address:
        asked.append((name, private, exist_ok))
        return Address("https://hub/somebody/small")

    def upload(api: HfApi, *, repo_id: str, folder_path: Path) -> SimpleNamespace:
        asked.append((repo_id, sorted(path.name for path in folder_path.iterdir())))
        return SimpleNamespace()

    monkeypatch.setattr(HfApi, "create_repo", create)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    export(run(tmp_path / "run"), tmp_path / "export", push="somebody/small")
    files = ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert asked == [("somebody/small", True, True), ("somebody/small", files)]
    assert capsys.readouterr().out.endswith("uploaded to https://hub/somebody/small\n")


def test_an_export_to_a_full_disk_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("zero_tp.model.weights.export.put_in_place", full)
    with pytest.raises(
        UserError,
        match=r"export: can't be written \(No space left on device\); give another --output",
    ):
        export(run(tmp_path / "run"), tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("name", "says"), [("no/such/name", "no/such/name"), ("somebody/small", "127.0.0.1")]
)
def test_an_upload_that_fails_is_one_line_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=f"^--push {name}: .*hf upload {name}") as raised:
        export(run(tmp_path / "run"), tmp_path / "export", push=name)
    assert says in str(raised.value) and "\n" not in str(raised.value)
    assert (tmp_path / "export" / "model.safetensors").is_file()
