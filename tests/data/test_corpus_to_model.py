"""The whole way: a table of raw texts, every step, a corpus, training on 4 ranks, a Hugging Face model."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.support.launched import furnish, metrics_of, pretrain, script
from zero_tp.data.documents import read_documents
from zero_tp.data.indexed import IndexedCorpus

ROOT = Path(__file__).parents[2]
ASIDE = "it was the best of times it was the worst of times it was the age of wisdom"


@pytest.mark.heavy
def test_from_a_parquet_file_to_a_trained_model(tmp_path: Path, seed: int) -> None:
    furnish(tmp_path)
    chance = random.Random(seed)
    words = [text.split() for text in read_documents(ROOT / "launch/corpus/sotu.jsonl.gz")]
    texts = [" ".join(each[at : at + 150]) for each in words for at in range(0, len(each) - 150, 150)]
    chance.shuffle(texts)
    planted = {
        "duplicate": texts[:20],
        "near-duplicate": [f"Indeed, {text}" for text in texts[20:40]],
        "short": ["Too short."] * 20,
        "contaminated": [f"{text} {ASIDE}" for text in texts[40:60]],
        "empty": [" "] * 5,
    }
    rows = texts[60:] + texts[:40] + [text for each in planted.values() for text in each]
    rows[0] = "The schÃ¶n word is mended. " + rows[0]
    pq.write_table(pa.table({"id": range(len(rows)), "content": rows}), tmp_path / "raw.parquet")
    (tmp_path / "held.jsonl").write_text(json.dumps({"question": ASIDE, "answer": "folly"}))
    steps = ["--repair-unicode", "--min-tokens", "128", "--deduplicate", "near", "--decontaminate", "held.jsonl"]
    prepared = script(
        "launch/prepare_data.py", tmp_path, "--input", "raw.parquet", "--tokenizer", "data/tokenizer", "--output",
        "cleaned", *steps, "--processes", "2",
    )  # fmt: skip
    assert prepared.returncode == 0, prepared.stderr
    counted = json.loads((tmp_path / "cleaned" / "report.json").read_text())["documents"]
    dropped = counted["dropped"]
    assert counted["read"] == len(rows) == counted["kept"] + sum(dropped.values())
    assert dropped["short"] == 20 and dropped["empty"] == 5 and dropped["duplicate"] == 20
    assert dropped["near-duplicate"] >= 20 and dropped["contaminated"] == 20
    corpus = IndexedCorpus(tmp_path / "cleaned" / "train")
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "cleaned" / "tokenizer"))
    first = [tokenizer.decode(corpus.document(i)) for i in range(2)]
    assert any("schön" in text for text in first) or "schön" in (tmp_path / "cleaned/validation.jsonl").read_text()
    assert all(len(corpus.document(i)) > 128 for i in range(len(corpus)))

    data = {"train": "cleaned/train", "validation": "cleaned/validation", "sequence_length": 64}
    arguments = ["--deepspeed_config", "small.json", "--set", f"zero_tp.data={json.dumps(data)}"]
    trained = pretrain(4, tmp_path, *arguments, "--set", "zero_tp.training.steps=40")
    assert trained.returncode == 0, trained.stderr
    losses = [line["loss"] for line in metrics_of(tmp_path / "runs" / "small") if "loss" in line]
    assert len(losses) == 40 and losses[-1] < losses[0] - 0.5
    exported = script("launch/convert.py", tmp_path, "to-hf", "runs/small", "--output", "model")
    assert exported.returncode == 0, exported.stderr
    assert GPT2LMHeadModel.from_pretrained(str(tmp_path / "model")).config.vocab_size == 512
