"""WikiText-103's perplexity against a script that scores one window at a time with transformers alone."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from transformers import AutoTokenizer, GPT2LMHeadModel

from tests.support.tiny_models import tiny_gpt2
from zero_tp.errors import UserError
from zero_tp.evaluation import perplexity
from zero_tp.evaluation.perplexity import original_tokens, wikitext_split
from zero_tp.evaluation.task import TaskOptions
from zero_tp.evaluation.zero_shot import EvaluationSettings, evaluate, make_tasks

POSITIONS = 48


@pytest.fixture(scope="module")
def text(shared_file: Callable[[str], Path]) -> str:
    with gzip.open(shared_file("data/wikitext-103-validation.txt.gz"), "rt", encoding="utf-8") as file:
        return file.read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", [text[:20_000]], positions=POSITIONS)


def brute_force(directory: Path, text: str, s: int, o: int) -> tuple[float, int]:
    """(summed NLL, tokens scored): windows of s tokens advance by o; all but the first score their last o targets."""
    model: Any = GPT2LMHeadModel.from_pretrained(str(directory)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(directory))
    ids = [tokenizer.eos_token_id, *tokenizer.encode(wikitext_detokenizer({"page": text}))]
    total, count = 0.0, 0
    for start in range(0, len(ids), o):
        window = ids[start : start + s + 1]
        already = 0 if start == 0 else s - o
        if len(window) - 1 <= already:
            continue  # nothing new in it
        with torch.no_grad():
            log_probabilities = model(torch.tensor([window[:-1]])).logits[0].double().log_softmax(1)
        targets = torch.tensor(window[1:])
        scored = -log_probabilities.gather(1, targets.unsqueeze(1))[already:, 0]
        total, count = total + scored.sum().item(), count + len(scored)
    return total, count


@pytest.mark.parametrize(("s", "o", "batch_size"), [(48, 32, 3), (48, 48, 1), (40, 7, 8), (32, 1, 8)])
def test_equals_one_window_at_a_time(model: Path, text: str, tmp_path: Path, s: int, o: int, batch_size: int) -> None:
    piece = text[: {1: 1500}.get(o, 6000)]
    (tmp_path / "wiki.txt").write_text(piece)
    report = evaluate(
        model,
        ["wikitext103"],
        {"wikitext103": tmp_path / "wiki.txt"},
        EvaluationSettings(device="cpu", batch_size=batch_size, sequence_length=s, overlap=o),
    )
    result = report["tasks"]["wikitext103"]
    nll, tokens = brute_force(model, piece, s, o)
    words = len(piece.strip().split(" "))
    assert result["tokens"] == tokens and result["original_tokens"] == words
    assert result["nll"] == pytest.approx(nll, rel=1e-6)
    assert result["perplexity_subword"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert result["overlap"] == o
    assert result["windows"] == math.ceil(max(0, tokens - s) / o) + 1
    last = (tokens - s) - (result["windows"] - 1) * o + s  # what is left for the last window to read
    assert result["tokens_computed"] == (result["windows"] - 1) * s + last


def test_the_divisions(model: Path, tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(" \n = Title = \n \n A b , c . \n")
    report = evaluate(model, ["wikitext103"], {"wikitext103": tmp_path / "wiki.txt"}, EvaluationSettings(device="cpu"))
    result = report["tasks"]["wikitext103"]
    # = Title = \n \n A b , c .
    assert result["original_tokens"] == 10
    for key, divisor in (("perplexity", 10), ("perplexity_released_code", 9), ("perplexity_subword", result["tokens"])):
        assert result[key] == pytest.approx(math.exp(result["nll"] / divisor))
    assert result["overlap"] == 32


def test_tokens_of_the_validation_split(shared_file: Callable[[str], Path], text: str) -> None:
    found, origin = wikitext_split(shared_file("data/wikitext-103-validation.txt.gz"), "text")
    assert found == text
    assert original_tokens(found) == 217_642
    assert len(origin["sha256"]) == 64


def test_the_hubs_lines_are_the_file(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The hub's rows are the file's lines, an empty string where a line has a space alone."""
    import datasets

    rows = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr(perplexity, "WIKITEXT_TEST_TOKENS", 217_642)
    assert wikitext_split(None, "text")[0] == text
    monkeypatch.setattr(perplexity, "WIKITEXT_TEST_TOKENS", 217_641)
    with pytest.raises(UserError, match=r"217,642 tokens, not the 217,641 .* give that with --data wikitext103=FILE"):
        wikitext_split(None, "text")


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"hub \(.*\): give the file with --data wikitext103=FILE \(wiki\.test\.tokens"):
        make_tasks(["wikitext103"], {}, TaskOptions())
    with pytest.raises(UserError, match="wikitext103 is one text"):
        make_tasks(["wikitext103"], {}, TaskOptions(limit=3))
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"text": str(n)}) + "\n" for n in range(2)))
    with pytest.raises(UserError, match="2 texts, where wikitext103 is one"):
        make_tasks(["wikitext103"], {"wikitext103": tmp_path / "two.jsonl"}, TaskOptions())
