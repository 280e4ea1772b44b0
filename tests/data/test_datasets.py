"""Corpora in PyTorch's DataLoader, transformers' Trainer and the documentation's example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.launched import ROOT
from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.data import CorpusDataset, CorpusStream
from zero_tp.data.samples import PackedSamples


def write(prefix: Path, lengths: list[int]) -> str:
    return str(write_corpus(prefix, [np.arange(length) % 1000 for length in lengths], 1000))


def test_a_map_style_data_set_has_the_samples_of_a_run(tmp_path: Path) -> None:
    blend = {write(tmp_path / "a", [30, 50]): 1.0, write(tmp_path / "b", [9] * 20): 3.0}
    packed, dataset = PackedSamples(blend, 8, 3), CorpusDataset(blend, 8, 3)
    assert len(dataset) == sum(packed.windows) and len(CorpusDataset(blend, 8, 3, 500)) == 500
    for at, batch in enumerate(DataLoader(dataset, batch_size=4, drop_last=True)):
        wanted = [packed[k][:-1].tolist() for k in range(4 * at, 4 * at + 4)]
        assert batch["input_ids"].tolist() == batch["labels"].tolist() == wanted
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    with pytest.raises(UserError, match="must be at least 2, and samples"):
        CorpusDataset(blend, 1)


def test_documents_apart_have_positions(tmp_path: Path) -> None:
    dataset = CorpusDataset(write(tmp_path / "a", [5, 3, 4, 30]), 8, separate=True)
    item = next(
        each
        for each in map(dataset.__getitem__, range(len(dataset)))
        if each["input_ids"][:5].tolist() == [*range(5)]
    )
    assert item["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert item["labels"].tolist() == [-100, 1, 2, 3, 4, -100, 1, 2]


def test_a_stream_is_shared_out(tmp_path: Path) -> None:
    """Over two ranks with two workers each, from sample 5 on: each sample once."""
    prefix = write(tmp_path / "a", [500])
    packed, items = PackedSamples({prefix: 1.0}, 8, 1234), list[list[int]]()
    for rank in range(2):
        shares = CorpusStream(prefix, 8, samples=21, first=5, rank=rank, world=2)
        items += [
            each["input_ids"].tolist()
            for each in DataLoader(shares, batch_size=None, num_workers=2)
        ]
    assert sorted(items) == sorted(packed[k][:-1].tolist() for k in range(5, 26))
    endless = iter(CorpusStream(prefix, 8))
    assert len([next(endless) for _ in range(200)]) == 200, "beyond one pass"
    with pytest.raises(UserError, match="rank 2 of 2"):
        CorpusStream(prefix, 8, rank=2, world=2)


def test_the_example_of_the_documentation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    texts = [f"document {i} of " + " ".join(map(str, range(i, i + 400))) for i in range(20)]
    pq.write_table(pa.table({"text": [*texts, texts[3]]}), "raw/a.parquet")
    for name in ("a", "b"):
        Path("data", name).mkdir(parents=True)
        write(Path("data", name, "train"), [2000])
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["prepared"].report["documents"]["dropped"] == {"duplicate": 1}
    assert (
        names["dataset"][0]["input_ids"].shape
        == next(iter(names["batches"]))["input_ids"].shape
        == (1024,)
    )


@THOROUGH
def test_transformers_trains_on_both(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    prefix = write(tmp_path / "a", [100] * 30)
    for dataset in (CorpusDataset(prefix, 16), CorpusStream(prefix, 16)):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=1000, n_positions=16)
        )
        arguments = TrainingArguments(
            str(tmp_path / "run"),
            max_steps=30,
            learning_rate=0.01,
            report_to=[],
            use_cpu=True,
            logging_steps=10,
            save_strategy="no",
            disable_tqdm=True,
            per_device_train_batch_size=8,
        )
        trainer = Trainer(model, arguments, train_dataset=dataset)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert losses[-1] < losses[0] - 0.5, losses
