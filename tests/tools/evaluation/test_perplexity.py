"""Perplexity, and WikiText-103's, against transformers' logits of one window at a time."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.support.tiny_models import tiny_gpt2
from tests.tiers import in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.parallel.token_scores import TokenScores
from zero_tp.tools.corpus.tokenizer_training import train_bpe
from zero_tp.tools.evaluation import perplexity as module
from zero_tp.tools.evaluation.eval_model import EvalModel, HuggingFaceScorer
from zero_tp.tools.evaluation.perplexity import (
    original_tokens,
    perplexity,
    sliding_windows,
    wikitext_split,
)
from zero_tp.tools.evaluation.settings import EvaluationSettings, TaskOptions
from zero_tp.tools.evaluation.task import as_json
from zero_tp.tools.evaluation.zero_shot import evaluate, make_tasks

DOCUMENTS = [
    "The state of the union is strong, my fellow citizens. " * 3,
    "Né en 1790.",
    "x",
    "A café — 👋!\n\n<|endoftext|>",
]


@pytest.fixture(scope="module")
def text(shared_file: Callable[[str], Path]) -> str:
    with gzip.open(
        shared_file("data/wikitext-103-validation.txt.gz"), "rt", encoding="utf-8"
    ) as file:
        return file.read()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, text: str) -> Path:
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "tiny", [text[:20_000]], positions=48)


def reference(model: Any, ids: list[int], s: int, o: int) -> tuple[float, int]:
    """Return (summed NLL, tokens scored): windows of s advance by o; all but the first score
    their last o targets.
    """
    total, count = 0.0, 0
    for start in range(0, len(ids), o):
        window = ids[start : start + s + 1]
        context = 0 if start == 0 else s - o
        if len(window) - 1 <= context:
            continue
        with torch.no_grad():
            log_probabilities = model(torch.tensor([window[:-1]])).logits[0].double().log_softmax(1)
        nll = -log_probabilities.gather(1, torch.tensor(window[1:]).unsqueeze(1))[context:, 0]
        total, count = total + nll.sum().item(), count + len(nll)
    return total, count


WINDOWS = [(s, o, size) for s, o in ((16, 16), (16, 5), (8, 8), (8, 1), (7, 3)) for size in (1, 3)]
FIRST_WINDOWS = [(16, 16, 1), (16, 5, 3), (8, 1, 3), (7, 3, 1)]


@pytest.mark.parametrize(("s", "o", "batch_size"), in_tiers(WINDOWS, FIRST_WINDOWS))
def test_equals_one_window_at_a_time(model: Path, s: int, o: int, batch_size: int) -> None:
    native: Any = GPT2LMHeadModel.from_pretrained(str(model)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(model))

    # Room for two rows' logits: batches of three are split.
    scorer = HuggingFaceScorer(native, logits_bytes=2 * s * native.config.vocab_size * 4)
    eval_model = EvalModel(
        scorer, native, tokenizer, native.config, window=s, batch_size=batch_size
    )
    result = perplexity([*DOCUMENTS, ""], eval_model, overlap=o)
    ids = [
        tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        for text in DOCUMENTS
    ]
    expected = [reference(native, [0, *document], s, o) for document in ids]
    assert result["nll"] == pytest.approx(sum(nll for nll, _ in expected), rel=1e-5)
    assert result["tokens"] == sum(map(len, ids)) == sum(count for _, count in expected)
    assert result["documents"] == len(DOCUMENTS)
    assert result["bytes"] == sum(len(text.encode()) for text in DOCUMENTS)
    assert result["characters"] == sum(map(len, DOCUMENTS))
    assert result["words"] == sum(len(text.split()) for text in DOCUMENTS)
    assert result["windows"] == sum(-(-max(0, len(document) - s) // o) + 1 for document in ids)
    assert result["loss"] == result["nll"] / result["tokens"]
    for figure, count in (("perplexity", "tokens"), ("word_perplexity", "words")):
        assert result[figure] == pytest.approx(math.exp(result["nll"] / result[count]))
    for figure, count in (("bits_per_byte", "bytes"), ("bits_per_character", "characters")):
        assert result[figure] == pytest.approx(result["nll"] / math.log(2) / result[count])


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_score_each_target_once(targets: int, s: int, data: st.DataObject) -> None:
    o = data.draw(st.integers(1, s))
    tokens = np.arange(targets + 1)
    scored: list[int] = []
    for number, row in enumerate(sliding_windows(tokens, s, o)):
        assert 1 <= len(row) <= s, "a window that scores nothing, or is too long"
        assert row.tokens.tolist() == list(range(row.tokens[0], row.tokens[0] + len(row) + 1))
        assert 1 <= row.scored <= (s if number == 0 else o)
        assert number == 0 or len(row) == s or row.tokens[-1] == targets
        scored += row.tokens[-row.scored :].tolist()
    assert scored == tokens[1:].tolist()


def test_an_infinite_perplexity_is_null() -> None:
    tokenizer = train_bpe(iter(DOCUMENTS), 280)

    def score(input_ids: torch.Tensor, labels: torch.Tensor) -> TokenScores:
        scored = labels != IGNORE_INDEX
        return TokenScores(scored * 1e6, scored)

    result = perplexity(
        ["four words of é"], EvalModel(score, None, tokenizer, GPT2Config(), window=16)
    )
    assert (result["words"], result["characters"], result["bytes"]) == (4, 15, 16)
    assert as_json(result)["perplexity"] is None


WIKITEXT: list[tuple[int, int | None, int]] = [(48, None, 3), (40, 7, 8), (48, 48, 1), (32, 1, 8)]


@pytest.mark.parametrize(("s", "o", "batch_size"), in_tiers(WIKITEXT, WIKITEXT[:2]))
def test_wikitext_equals_one_window_at_a_time(
    model: Path, text: str, tmp_path: Path, s: int, o: int | None, batch_size: int
) -> None:
    piece = text[: 1500 if o == 1 else 6000]
    (tmp_path / "wiki.txt").write_text(piece)
    report = evaluate(
        model,
        ["wikitext103"],
        {"wikitext103": tmp_path / "wiki.txt"},
        EvaluationSettings(device="cpu", batch_size=batch_size, sequence_length=s, overlap=o),
    )
    result = report["tasks"]["wikitext103"]
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    ids = [tokenizer.eos_token_id, *tokenizer.encode(wikitext_detokenizer({"page": piece}))]
    nll, tokens = reference(GPT2LMHeadModel.from_pretrained(str(model)).eval(), ids, s, o or 32)
    words = len(piece.strip().split(" "))
    assert result["tokens"] == tokens and result["original_tokens"] == words
    assert result["nll"] == pytest.approx(nll, rel=1e-6)
    divisors = {
        "perplexity": words,
        "perplexity_released_code": words - 1,
        "perplexity_subword": tokens,
    }
    for figure, divisor in divisors.items():
        assert result[figure] == pytest.approx(math.exp(nll / divisor), rel=1e-5)
    assert result["overlap"] == (o or 32)
    assert result["windows"] == math.ceil(max(0, tokens - s) / result["overlap"]) + 1
    # What is left for the last window to read.
    last = (tokens - s) - (result["windows"] - 1) * result["overlap"] + s
    assert result["tokens_computed"] == (result["windows"] - 1) * s + last


def test_the_hubs_lines_are_the_file(
    monkeypatch: pytest.MonkeyPatch, shared_file: Callable[[str], Path], text: str
) -> None:
    """The hub's rows are the file's lines, an empty string where a line has a space alone."""
    import datasets

    assert wikitext_split(shared_file("data/wikitext-103-validation.txt.gz"), "text")[0] == text
    assert original_tokens(text) == 217_642
    rows = [{"text": line if line.strip() else ""} for line in text.splitlines(keepends=True)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr(module, "WIKITEXT_TEST_TOKENS", 217_642)
    assert wikitext_split(None, "text")[0] == text
    monkeypatch.setattr(module, "WIKITEXT_TEST_TOKENS", 217_641)
    with pytest.raises(
        UserError,
        match=r"217,642 tokens, not the 217,641 .* give that with --data wikitext103=FILE",
    ):
        wikitext_split(None, "text")


def test_another_text_than_the_test_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"hub \(.*\); give the file with --data wikitext103=FILE \(wiki\.test\.tokens",
    ):
        make_tasks(["wikitext103"], {}, TaskOptions())
    (tmp_path / "two.jsonl").write_text(
        "".join(json.dumps({"text": str(n)}) + "\n" for n in range(2))
    )
    with pytest.raises(UserError, match="2 texts, but wikitext103 is one"):
        make_tasks(["wikitext103"], {"wikitext103": tmp_path / "two.jsonl"}, TaskOptions())
