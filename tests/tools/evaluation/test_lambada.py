"""LAMBADA against transformers, one passage at a time, and the forms of its files."""

from __future__ import annotations

import csv
import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.support.tiny_models import tiny_gpt2
from zero_tp.base.errors import UserError
from zero_tp.tools.evaluation.lambada import lambada_passages
from zero_tp.tools.evaluation.settings import EvaluationSettings
from zero_tp.tools.evaluation.zero_shot import evaluate


@pytest.fixture(scope="module")
def passages(shared_file: Callable[[str], Path]) -> Path:
    return shared_file("data/lambada_openai_first1000.jsonl")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learned a few words by heart, so that some answers are right."""
    texts = [f"one two three and {word} {word}" for word in ("four", "twelve", "seventy")]
    directory = tiny_gpt2(
        tmp_path_factory.mktemp("models") / "tiny", [*texts, "other words"] * 5, vocabulary=300
    )
    model: Any = GPT2LMHeadModel.from_pretrained(str(directory))
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        for text in texts:
            ids = torch.tensor([tokenizer.encode(text)])
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(str(directory))
    return directory


def one_at_a_time(directory: Path, pairs: list[tuple[str, str]]) -> tuple[list[bool], list[float]]:
    model: Any = GPT2LMHeadModel.from_pretrained(str(directory)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    right, losses = [], []
    for context, word in pairs:
        before, after = tokenizer.encode(context), tokenizer.encode(" " + word)
        ids = torch.tensor([[*before, *after]])
        with torch.no_grad():
            log_probabilities = (
                model(ids[:, :-1]).logits[0, len(before) - 1 :].double().log_softmax(1)
            )
        targets = torch.tensor(after)
        right.append(bool((log_probabilities.argmax(1) == targets).all()))
        losses.append(-log_probabilities.gather(1, targets.unsqueeze(1)).sum().item())
    return right, losses


@pytest.mark.slow
def test_equals_one_passage_at_a_time(model: Path, tmp_path: Path) -> None:
    pairs = [
        ("one two three and four", "four"),
        ("one two three and twelve", "twelve"),
        ("one two", "seventy"),
    ]
    pairs += [("other words", "two"), ("one two three and seventy", "seventy")]
    file = tmp_path / "lambada.jsonl"
    file.write_text("".join(json.dumps({"context": a, "continuation": b}) + "\n" for a, b in pairs))
    report = evaluate(
        model, ["lambada"], {"lambada": file}, EvaluationSettings(device="cpu", batch_size=2)
    )
    result = report["tasks"]["lambada"]
    right, losses = one_at_a_time(model, pairs)
    assert 0 < sum(right) < len(right)
    assert result["accuracy"] == sum(right) / len(right)
    assert result["nll"] == pytest.approx(sum(losses), rel=1e-6)
    assert result["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
    assert result["examples"] == 5 and result["truncated"] == 0
    limited = EvaluationSettings(device="cpu", limit=2)
    assert (
        evaluate(model, ["lambada"], {"lambada": file}, limited)["tasks"]["lambada"]["examples"]
        == 2
    )


@pytest.mark.slow
def test_longer_passages_are_cut_on_the_left(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "lambada.txt"
    file.write_text("other " * 200 + "one two three and four four\none two three and four four\n")
    settings = EvaluationSettings(device="cpu", sequence_length=12)
    result = evaluate(model, ["lambada"], {"lambada": file}, settings)["tasks"]["lambada"]
    assert result["truncated"] >= 1 and result["examples"] == 2
    assert result["tokens_computed"] <= 24


def test_all_forms_of_the_file_are_the_same_passages(passages: Path, tmp_path: Path) -> None:
    found, _ = lambada_passages(passages, "text", 50)
    records = [json.loads(line) for line in passages.read_text(encoding="utf-8").splitlines()[:50]]
    assert found == [(each["context"].rstrip(), f" {each['continuation']}") for each in records]
    whole = [each["context"] + " " + each["continuation"] for each in records]
    assert all("\n" in text for text in whole[:3]), "the test wants white space of all kinds"
    with gzip.open(tmp_path / "texts.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps({"passage": text}) + "\n" for text in whole))
    assert lambada_passages(tmp_path / "texts.jsonl.gz", "passage", None)[0] == found
    with open(tmp_path / "texts.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "passage"), *(("no passage", text) for text in whole)])
    assert lambada_passages(tmp_path / "texts.csv", "passage", None)[0] == found
    (tmp_path / "lines.txt").write_text(
        "".join(" ".join(text.split()) + "\n" for text in whole), encoding="utf-8"
    )
    lines, _ = lambada_passages(tmp_path / "lines.txt", "text", None)
    assert [word for _, word in lines] == [word for _, word in found]


def test_the_hubs_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(
        datasets,
        "load_dataset",
        lambda *_, **__: [{"text": "I say\n\nyes and no"}, {"text": "b c"}],
    )
    found, origin = lambada_passages(None, "text", 1)
    assert found == [("I say\n\nyes and", " no")]
    assert origin["dataset"] == "EleutherAI/lambada_openai" and len(origin["sha256"]) == 64


def test_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "wrong.jsonl"
    for line, message in [
        ('{"question": "a b"}', r"wrong\.jsonl:1: no key 'text'; the keys found are 'question'"),
        ('{"context": "a b"}', "'context' and 'continuation' go together; its keys are context"),
        ('{"context": "a b", "continuation": " "}', "wrong.jsonl:1: its continuation is empty"),
        ('{"text": "word"}', "needs at least two words"),
        ("", "it has no passage"),
    ]:
        file.write_text(line)
        with pytest.raises(UserError, match=message):
            lambada_passages(file, "text", None)
    with pytest.raises(
        UserError,
        match=r"lambada_openai can't be loaded .* --data lambada=FILE \(lambada_test\.jsonl\)",
    ):
        lambada_passages(None, "text", None)
