"""Runs on packed documents against the plain run on each document by itself, whatever the
micro-batch.

Documents are so short and so unequal that micro-batches predict different numbers of tokens, and
some none at all: a mean of their means would train another model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from tests.support.closeness import of_fp32
from tests.support.families import SEQUENCE, model_sizes
from tests.support.launched import metrics_of, pretrain
from tests.support.matrix import WORLD, config_of
from tests.support.packed_documents import token_losses_apart
from tests.support.parallel_run import train
from tests.support.plain_run import GLOBAL_BATCH, STEPS, draw_weights
from tests.support.pools import Pools
from tests.support.settings import gpt2_config
from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.samples import PackedSamples


def write_documents(prefix: Path, seed: int, vocabulary: int) -> None:
    """Documents of 1 to 60 tokens, most of them short, and a stretch of single tokens that holds 8
    whole windows.

    A run sees three of four windows: it misses all of those once in 100,000 seeds.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = [int(60 ** float(torch.rand((), generator=generator))) for _ in range(200)]
    lengths[100:100] = [1] * (9 * SEQUENCE)
    documents = (
        torch.randint(vocabulary, (length,), generator=generator).numpy() for length in lengths
    )
    write_corpus(prefix, documents, vocabulary)


def numbers_of(corpus: IndexedCorpus) -> Tensor:
    """The document of each token of the stream."""
    lengths = torch.tensor([len(corpus.document(number)) for number in range(len(corpus))])
    return torch.arange(len(lengths)).repeat_interleave(lengths)


class Apart:
    """The losses of a step: every piece of a document by itself, over the tokens predicted in
    the whole batch.
    """

    def __init__(self, prefix: str, sequence_length: int, seed: int, global_batch: int):
        self.corpus, self.size = IndexedCorpus(prefix), global_batch
        # Which window a sample is stays as it is without documents, which other tests prove.
        self.samples = PackedSamples({prefix: 1.0}, sequence_length, seed)
        self.numbers = numbers_of(self.corpus)

    def rows(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Tokens and documents of each row, [1, s + 1] each."""
        s, found = self.samples.sequence_length, []
        for k in range(step * self.size, (step + 1) * self.size):
            start = int(self.samples.locate(np.array([k]))[2][0]) * s
            found.append(
                (torch.from_numpy(self.samples[k])[None], self.numbers[None, start : start + s + 1])
            )
        return found

    def __call__(self, model: Any, step: int) -> Iterator[Tensor]:
        rows = self.rows(step)
        predicted = [int((documents[:, 1:] == documents[:, :-1]).sum()) for _, documents in rows]
        for (tokens, documents), count in zip(rows, predicted, strict=True):
            if count:
                total, found = token_losses_apart(model, tokens, documents)
                assert found == count
                yield total / sum(predicted)


@pytest.fixture(scope="module")
def apart(run_seed: int, tmp_path_factory: pytest.TempPathFactory) -> Apart:
    prefix = tmp_path_factory.mktemp("documents") / "corpus"
    write_documents(prefix, run_seed, model_sizes(run_seed)["vocab_size"])
    return Apart(str(prefix), SEQUENCE, run_seed, GLOBAL_BATCH)


@THOROUGH
@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    [
        (1, ("TP 2", "SP", "ZeRO-1", "full")),
        (2, ("TP 2", "SP", "ZeRO-3", "selective")),
        (4, ("TP 2", "no SP", "ZeRO-2", "full, P_a, cpu")),
        (6, ("TP 1", "no SP", "ZeRO-0", "none")),
    ],
    ids=[1, 2, 4, 6],
)
def test_a_run_on_packed_documents_trains_the_plain_model(
    ranks: Pools,
    run_seed: int,
    tmp_path: Path,
    apart: Apart,
    micro_batch: int,
    settings: tuple[str, ...],
) -> None:
    config = config_of((*settings, "no offload", "× 1", "fp32"), run_seed)
    config["gradient_accumulation_steps"] = (
        GLOBAL_BATCH * int(settings[0][3:]) // WORLD // micro_batch
    )
    config["zero_tp"]["data"] |= {"train": apart.corpus.prefix, "document_attention": "reset"}
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config))
    traces = ranks(WORLD).run(train, path, from_corpus=True)
    assert all(trace.losses == traces[0].losses and len(trace.losses) == STEPS for trace in traces)
    far = of_fp32(traces[0], run_seed, losses_of=apart)
    assert not {name: distance for name, distance in far.items() if not distance <= 1}


def test_micro_batches_of_these_runs_predict_different_numbers(apart: Apart) -> None:
    rows = [documents for step in range(STEPS) for _, documents in apart.rows(step)]
    counts = [int((documents[:, 1:] == documents[:, :-1]).sum()) for documents in rows]
    assert 0 in counts and len(set(counts)) > 5


@THOROUGH
def test_the_losses_that_a_run_logs(workplace: Path) -> None:
    """launch/pretrain.py at almost no learning rate: training and validation losses of the first
    weights.
    """
    settings = {
        "zero_tp.data.document_attention": "reset",
        "zero_tp.training.steps": "2",
        "zero_tp.evaluation.interval": "1",
        "optimizer.params.lr": "1e-30",
        **dict.fromkeys(
            (f"zero_tp.model.{name}_pdrop" for name in ("embd", "resid", "attn")), "0.0"
        ),
    }
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = pretrain(
        4, workplace, "--deepspeed_config", "small.json", "--output-dir", "documents", *changes
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = workplace / "documents"
    block = json.loads((run / "config.json").read_text())["zero_tp"]
    length, batch = block["data"]["sequence_length"], 8
    config = gpt2_config(
        **{name: value for name, value in block["model"].items() if name != "model_type"}
    )
    model = GPT2LMHeadModel(config).eval()
    draw_weights(model, config, block["training"]["seed"])

    records = metrics_of(run)
    trained = Apart(str(workplace / "data" / "train"), length, block["training"]["seed"], batch)
    with torch.no_grad():
        expected = [sum(loss.item() for loss in trained(model, step)) for step in range(2)]
    assert [record["loss"] for record in records if "loss" in record] == pytest.approx(
        expected, rel=1e-5
    )

    corpus = IndexedCorpus(workplace / "data" / "validation")
    windows, scored = -(-(corpus.tokens - 1) // length), block["evaluation"]["batches"] * batch
    total, count = 0.0, 0
    for place in range(scored):
        start = place * windows // scored * length
        tokens = torch.from_numpy(corpus.read(start, min(length + 1, corpus.tokens - start)))[None]
        with torch.no_grad():
            loss, predicted = token_losses_apart(
                model, tokens, numbers_of(corpus)[None, start : start + length + 1]
            )
        total, count = total + loss.item(), count + predicted
    assert windows > scored
    found = [record["validation_loss"] for record in records if "validation_loss" in record]
    assert found == pytest.approx([total / count] * 2, rel=1e-5)
