"""The validation loss of several corpora is the weighted mean of transformers' losses of each."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from tests.support.run_log import RunLog
from tests.support.tiny_models import write_corpus
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.data.validation_samples import ValidationSamples
from zero_tp.run.run_callbacks import Validation

S, BATCH, VOCABULARY = 8, 4, 32


class PlainEngine:
    """Evaluates batches with transformers' model, as one rank of one."""

    device, topology = torch.device("cpu"), SimpleNamespace(rank=0, data_rank=0, data=1)

    def __init__(self, model: GPT2LMHeadModel) -> None:
        self.model, self.scored = model, list[int]()

    def evaluate(self, batches: list[Any]) -> dict[str, float]:
        ids, labels = (
            torch.cat(parts) for parts in zip(*(batch[:2] for batch in batches), strict=True)
        )
        self.scored.append(int((labels != IGNORE_INDEX).any(1).sum()))
        with torch.no_grad():
            return {
                "loss": cross_entropy(self.model(ids).logits.flatten(0, 1), labels.flatten()).item()
            }


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=S, vocab_size=VOCABULARY, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).eval()


def loss_of(model: GPT2LMHeadModel, tokens: np.ndarray) -> float:
    """transformers' loss, which shifts the labels itself, of a corpus' windows at stride s."""
    losses = []
    for start in range(0, len(tokens) - 1, S):
        window = torch.from_numpy(tokens[start : start + S + 1])[None]
        with torch.no_grad():
            logits = model(window[:, :-1]).logits
            losses.append(
                model.loss_function(logits, None, VOCABULARY, shift_labels=window[:, 1:])
                * (window.shape[1] - 1)
            )
    return float(sum(losses)) / (len(tokens) - 1)


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 1.0), (0.02, 0.06), None])
def test_validation_losses_are_weighted(
    tmp_path: Path, model: GPT2LMHeadModel, weights: tuple[float, float] | None
) -> None:
    draw = np.random.default_rng(1)
    corpora = [draw.integers(0, VOCABULARY, 3 * S), np.full(40 * S, 3)]
    prefixes = [
        str(write_corpus(tmp_path / name, [tokens], VOCABULARY))
        for name, tokens in zip("ab", corpora, strict=True)
    ]
    samples = ValidationSamples(
        dict(zip(prefixes, weights, strict=True)) if weights else prefixes, S
    )
    losses = [loss_of(model, tokens) for tokens in corpora]
    assert abs(losses[0] - losses[1]) > 0.1
    shares = np.array(weights or (1.0, 1.0)) / sum(weights or (1.0, 1.0))
    for batches, expected in ((200, float(shares @ losses)), (5, None)):
        with RunLog(tmp_path) as log:
            engine: Any = PlainEngine(model)
            log.state.engine, log.state.inputs.validation = engine, samples
            log.state.inputs.config = SimpleNamespace(
                zero_tp=SimpleNamespace(
                    evaluation=SimpleNamespace(batches=batches),
                    training=SimpleNamespace(ema=None),
                ),
                global_batch=BATCH,
                micro_batch=2,
            )
            Validation().on_evaluate(log.state)
        logged = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
        if expected is not None:
            assert logged["validation_loss"] == pytest.approx(expected, rel=1e-6)
        assert engine.scored == [
            min(int(np.rint(batches * BATCH * share)), most)
            for share, most in zip(shares, (3, 40), strict=True)
        ]
