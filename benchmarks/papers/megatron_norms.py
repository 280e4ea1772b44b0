"""BERTs with both orders of layer norm at growing depth (arXiv 1909.08053, figure 7)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from benchmarks.papers.engines import ONE_MICRO_BATCH
from benchmarks.papers.pictures import losses
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row, Table
from benchmarks.papers.runs import changes_of, metrics_of, trained
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.data import PrepareSettings, prepare
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import run_model_size

ORDERS = {"original": "bert", "rearranged": "megatron-bert"}
"""Post-norm and pre-norm."""
DEPTHS = (4, 12, 24)
HIDDEN = 64
STEPS = 800
LARGE = shipped_path(CONFIGS) / "bert_336m.json"
INITIAL = 0.08
"""Scaled from BERT-large's 0.02 at hidden size 1,024: at 0.02 a layer of 64 changes its input
too little.
"""
VOCABULARY = 2048
BATCH = 48
SMOOTHED = 20
"""Steps of the moving mean in the picture."""


def norm_order(*, measured: bool) -> Reproduction:
    """The loss of masked tokens at growing depth, in both orders."""
    large = {
        order: RunConfig.load(LARGE, [*ONE_MICRO_BATCH, f"zero_tp.model.model_type={type_}"], 8)
        for order, type_ in ORDERS.items()
    }
    rows: dict[str, Table] = {}
    learning: dict[str, dict[str, Sequence[float]]] = {}
    if measured:
        with tempfile.TemporaryDirectory() as folder:
            corpus, unigram = corpus_in(Path(folder))
            small = [Row("word frequencies alone", "nats", unigram)]
            for depth, order in product(DEPTHS, ORDERS):
                table_rows, lines = learnt(order, depth, corpus, Path(folder) / f"{order}-{depth}")
                small += table_rows
                learning.setdefault(f"{order} ({ORDERS[order]})", {})[f"{depth} layers"] = lines
        rows["in small, all else alike"] = small
    rows["parameters of BERT-large in both orders"] = [
        Row(order, "M", None, run_model_size(config).num_parameters / 1e6, None, 336)
        for order, config in large.items()
    ]
    notes = (
        f"In small: hidden {HIDDEN}, {STEPS} steps of {BATCH} rows of 16 tokens, no dropout, one "
        "seed. The paper finds",
        "that models beyond BERT-large train stably in the rearranged order alone; its curves have "
        "no numbers.",
    )
    return Reproduction(
        "BERT's order of layer norms (figure 7)", rows, losses(learning, "masked token"), notes
    )


def corpus_in(folder: Path) -> tuple[Path, float]:
    """Prepare the shipped corpus; return its path, and the validation loss of word frequencies
    alone.
    """
    settings = PrepareSettings(f"wordpiece:{VOCABULARY}", sentences="en")
    corpus = prepare(
        [shipped_path("launch") / "corpus" / "sotu.jsonl.gz"],
        folder / "corpus",
        settings,
        progress=False,
    )
    report = json.loads((corpus.output / "report.json").read_text())
    return corpus.output, report["unigram"]["validation_cross_entropy"]


def learnt(order: str, depth: int, corpus: Path, directory: Path) -> tuple[list[Row], list[float]]:
    """Train a BERT on two ranks; return rows of its validation metrics, and the moving mean of
    its losses.
    """
    model = {
        "model_type": ORDERS[order],
        "num_hidden_layers": depth,
        "hidden_size": HIDDEN,
        "num_attention_heads": HIDDEN // 16,
        "intermediate_size": 4 * HIDDEN,
        "max_position_embeddings": 16,
        "vocab_size": VOCABULARY,
        "initializer_range": INITIAL,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    changes = [
        *changes_of(model, corpus, STEPS, STEPS // 16),
        "zero_tp.parallel.tensor=1",
        "zero_tp.parallel.sequence=false",
        f"train_micro_batch_size_per_gpu={BATCH // 2}",
        "zero_tp.evaluation.batches=20",
    ]
    _, lines = trained(shipped_path(CONFIGS) / "bert_small.json", changes, 2, directory)
    each = [line["loss"] for line in lines]
    last = metrics_of(directory)[-1]
    return [
        Row(f"{depth} layers, {order}: held-out loss", "nats", last["validation_loss"]),
        Row(
            f"{depth} layers, {order}: masked tokens",
            "% right",
            100 * last["validation_masked_accuracy"],
        ),
    ], [
        sum(window) / len(window)
        for at in range(len(each))
        if (window := each[max(0, at - SMOOTHED) : at + 1])
    ]
