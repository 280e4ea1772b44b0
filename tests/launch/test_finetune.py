"""launch/finetune.py as a user starts it: two ranks, both variants, one table, and the saved
model.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification, BertConfig, BertForPreTraining

from tests.support.launched import ROOT, script
from tests.support.tiny_models import speeches, tiny_gpt2
from zero_tp.data.documents import read_documents
from zero_tp.tools.corpus.tokenizer_training import train_wordpiece

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small exported BERT, and sentences that are labelled with their first word."""
    folder = tmp_path_factory.mktemp("finetune")
    text = next(iter(read_documents(ROOT / "launch/corpus/sotu.jsonl.gz")))
    tokenizer = train_wordpiece(lambda: iter([text]), 300, cased=False)
    tokenizer.save_pretrained(str(folder / "export"))
    BertForPreTraining(BertConfig(vocab_size=300, **SIZES)).save_pretrained(str(folder / "export"))
    words, chance = text.split(), random.Random(1)
    rows = []
    for _ in range(400):
        at, kind = chance.randrange(len(words) - 6), chance.choice(["congress", "people"])
        rows.append({"first": " ".join([kind, *words[at : at + 5]]), "label": kind})
    for name, part in {"train": rows[:320], "validation": rows[320:]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


@pytest.mark.thorough
def test_both_variants_are_in_one_table(workplace: Path) -> None:
    done = script(
        "launch/finetune.py",
        workplace,
        "--model",
        "export",
        "--task",
        "classification",
        "--train",
        "train.jsonl",
        "--validation",
        "validation.jsonl",
        "--epochs",
        "4",
        "--lr",
        "3e-3",
        "--length",
        "32",
        "--save",
        "saved",
        "--zero-stage",
        "3",
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()[-4:]
    assert table[0] == "classification, 320 training examples"
    assert [line.split()[0] for line in table[1:]] == ["weights", "pretrained", "random"]
    assert table[1].split()[1:] == ["accuracy"]
    assert float(table[2].split()[1].rstrip("%")) > 95, "the label is the first word"
    model = AutoModelForSequenceClassification.from_pretrained(workplace / "saved")
    assert model.config.id2label == {0: "congress", 1: "people"}


@pytest.mark.thorough
def test_a_mistake_is_one_line(workplace: Path) -> None:
    files = ["--train", "train.jsonl", "--validation", "validation.jsonl"]
    done = script("launch/finetune.py", workplace, "--model", "export", "--task", "mnli", *files)
    assert (done.returncode, done.stdout) == (2, "")
    assert "has no sentence1, only first, label: the task reads sentence1, " in done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_a_decoder_is_fine_tuned_and_pads_with_its_end_of_text(workplace: Path) -> None:
    tiny_gpt2(workplace / "decoder", speeches(1, 20_000))
    done = script(
        "launch/finetune.py",
        workplace,
        "--model",
        "decoder",
        "--task",
        "classification",
        "--train",
        "train.jsonl",
        "--validation",
        "validation.jsonl",
        "--epochs",
        "1",
        "--lr",
        "3e-3",
        "--length",
        "32",
        "--ranks",
        "1",
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-2].split()[1].rstrip("%")) > 75, (
        "the label is the first word"
    )


@pytest.mark.thorough
@pytest.mark.parametrize(("task", "metrics"), [("squad", "F1 exact match"), ("race", "accuracy")])
def test_spans_and_choices_are_trained(workplace: Path, task: str, metrics: str) -> None:
    context = (
        "The university's library opened in 1892. It holds eleven million volumes, and it is well "
        "lit."
    )
    if task == "squad":
        answer = {"text": "1892", "answer_start": context.index("1892")}
        entries = [
            {"question": "When did it open?", "answers": [answer]},
            {"question": "Who burnt it?", "answers": []},
        ]
        content: Any = {"data": [{"paragraphs": [{"context": context, "qas": entries}] * 4}]}
    else:
        options = [["1492", "1692", "1892", "1992"], ["rivers", "volumes", "bridges", "lamps"]]
        questions = ["It opened in _ .", "What does it hold?"]
        content = {
            "article": context,
            "questions": questions,
            "options": options,
            "answers": ["C", "B"],
        }
    (workplace / f"{task}.txt").write_text(json.dumps(content))
    done = script(
        "launch/finetune.py",
        workplace,
        "--model",
        "export",
        "--task",
        task,
        "--train",
        f"{task}.txt",
        "--validation",
        f"{task}.txt",
        "--epochs",
        "1",
        "--length",
        "48",
        "--batch-size",
        "2",
        "--ranks",
        "1",
    )
    assert done.returncode == 0, done.stderr
    table = done.stdout.splitlines()[-4:]
    assert table[0] == f"{task}, {8 if task == 'squad' else 2} training examples"
    assert table[1].split() == ["weights", *metrics.split()]
    assert [line.split()[0] for line in table[2:]] == ["pretrained", "random"]
