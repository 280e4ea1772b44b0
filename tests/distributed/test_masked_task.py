"""The task `masked` against a plain transformers loop, on TP × DP ranks and from a checkpoint's own weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, BertTokenizer, GPT2Config, GPT2LMHeadModel

from tests.launched import script
from tests.native import perturbed
from tests.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.errors import UserError
from zero_tp.evaluation import zero_shot
from zero_tp.evaluation.masked import MaskedTask
from zero_tp.evaluation.pretrained import open_directory
from zero_tp.evaluation.task import TaskOptions

POSITIONS = 12
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{letter}" for letter in "klmnop")]
TEXTS = ["ak b cl d e fm g h i jn a b c", "a b", "eo fp g"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model with its tokenizer, random everywhere, and texts: one longer than a window."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=POSITIONS,
    )
    model: Any = perturbed(BertForPreTraining(config), 0.3)
    model.save_pretrained(tmp_path / "model")
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}).save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def plain(directory: Path) -> dict[str, float]:
    """A forward for each token, which is masked in it."""
    model: Any = BertForPreTraining.from_pretrained(directory / "model").eval()
    tokenizer: Any = BertTokenizer.from_pretrained(directory / "model")
    nll, right, tokens = 0.0, 0, 0
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids), POSITIONS - 2):
            row = torch.tensor([[2, *ids[start : start + POSITIONS - 2], 3]])
            for place in range(1, row.shape[1] - 1):
                masked = row.clone()
                masked[0, place] = 4
                with torch.no_grad():
                    scores = model(masked).prediction_logits[0, place].double().log_softmax(0)
                nll -= scores[row[0, place]].item()
                right += int(scores.argmax() == row[0, place])
                tokens += 1
    return {"tokens": tokens, "nll": nll, "accuracy": right / tokens}


def scored(directory: Path, tensor: int, batch: int) -> dict[str, Any]:
    from tests.compare import grid

    opened = open_directory(directory / "model")
    task = MaskedTask(directory / "texts.jsonl", TaskOptions())
    return task.run(opened.load("float32", "cpu", grid(tensor, False), batch_size=batch))


def test_masked_equals_a_plain_loop(ranks: Pools, directory: Path) -> None:
    expected = plain(directory)
    assert expected["tokens"] > 20 and 0 < expected["accuracy"] < 1
    for tensor, batch in ((1, 3), (2, 8)):
        found = ranks(4).run(scored, directory, tensor, batch)
        assert found == found[:1] * 4
        assert {name: found[0][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    mean = expected["nll"] / expected["tokens"]
    assert found[0]["pseudo_perplexity"] == pytest.approx(torch.tensor(mean).exp().item(), rel=1e-4)
    assert found[0]["words"] == sum(len(text.split()) for text in TEXTS)


def test_what_a_task_cannot_score_is_refused(directory: Path) -> None:
    texts = {"masked": directory / "texts.jsonl", "perplexity": directory / "texts.jsonl"}
    settings = zero_shot.EvaluationSettings()
    with pytest.raises(UserError, match="perplexity: scores causal models, and this one is an encoder"):
        zero_shot.evaluate(directory / "model", ["perplexity"], {"perplexity": texts["perplexity"]}, settings)
    config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=len(WORDS), bos_token_id=2, eos_token_id=3)
    GPT2LMHeadModel(config).save_pretrained(directory / "causal")
    tokenizer: Any = BertTokenizer.from_pretrained(directory / "model")
    tokenizer.eos_token = "[SEP]"
    tokenizer.save_pretrained(directory / "causal")
    with pytest.raises(UserError, match="masked: scores encoders, and this model is causal"):
        zero_shot.evaluate(directory / "causal", ["masked"], {"masked": texts["masked"]}, settings)
    bare: Any = BertForPreTraining.from_pretrained(directory / "model")
    bare.bert.save_pretrained(directory / "bare")
    tokenizer.save_pretrained(directory / "bare")
    with pytest.raises(UserError, match="it has no weights of the head of masked tokens"):
        zero_shot.evaluate(directory / "bare", ["masked"], {"masked": texts["masked"]}, settings)


@THOROUGH
def test_the_command(directory: Path) -> None:
    words = ("--model", "model", "--tasks", "masked", "--data", "masked=texts.jsonl", "--output", "out.json")
    done = script("eval/zero_shot.py", directory, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((directory / "out.json").read_text())["tasks"]["masked"]
    assert found["accuracy"] == pytest.approx(plain(directory)["accuracy"])
    assert "accuracy" in done.stdout
