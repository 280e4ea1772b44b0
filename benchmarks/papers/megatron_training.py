"""What GPT-2s of three sizes learn, and one of them on TP 1, 2 and 4 (arXiv 1909.08053, section
5.2).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.papers import pictures, published
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row, Table
from benchmarks.papers.runs import changes_of, plainly_trained, trained
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.data import PrepareSettings, prepare
from zero_tp.data.documents import read_documents
from zero_tp.run.config import RunConfig
from zero_tp.tools.evaluation.settings import EvaluationSettings
from zero_tp.tools.evaluation.zero_shot import evaluate
from zero_tp.tools.planning.memory import run_model_size

ZERO_SHOT = {"355 M": (19.31, 45.18), "2.5 B": (12.76, 61.73), "8.3 B": (10.81, 66.51)}
TASKS = {"WikiText-103": "perplexity", "LAMBADA": "% right"}
"""What is published of each (section 5.2)."""
LARGE = "papers/gpt2_1.2b.json"
BILLIONS = 1.213
"""A model of the scaling study, and its parameters (table 1)."""
SIZES = {"small": (2, 48, 4), "medium": (3, 96, 4), "large": (4, 192, 4)}
"""Layers, hidden, heads."""
VOCABULARY = 2048
LENGTH = 128
BATCH = 8
STEPS = 200
CHARACTERS = 20_000
"""Of each speech."""
HELD_OUT = 20
"""Each speech of so many is kept from training."""
PASSAGE = range(30, 60)
"""Words of a passage whose last word is asked for."""


@dataclass(frozen=True)
class Texts:
    """Texts are a corpus to train on, and files of what was held out: one text, and passages."""

    corpus: Path
    text: Path
    passages: Path


def texts_in(folder: Path) -> Texts:
    """Prepare the shipped speeches."""
    speeches = [
        text[:CHARACTERS]
        for text in read_documents(shipped_path("launch") / "corpus" / "sotu.jsonl.gz")
    ]
    held_out = speeches[::HELD_OUT]
    source = folder / "speeches.jsonl"
    text = folder / "held_out.txt"
    passages = folder / "passages.txt"
    others = (each for number, each in enumerate(speeches) if number % HELD_OUT)
    source.write_text("".join(json.dumps({"text": each}) + "\n" for each in others))
    text.write_text("\n".join(each[: CHARACTERS // 5] for each in held_out))
    sentences = (" ".join(part.split()) for each in held_out for part in each.split("."))
    passages.write_text(
        "\n".join(part for part in sentences if len(part.split()) in PASSAGE) + "\n"
    )
    corpus = prepare(
        [source], folder / "corpus", PrepareSettings(f"bpe:{VOCABULARY}"), progress=False
    ).output
    return Texts(corpus, text, passages)


def changes(size: str, texts: Texts, tensor: int, **model: Any) -> list[str]:
    """Return the changes to ds_configs/quickstart.json, whose models have no dropout."""
    layers, hidden, heads = SIZES[size]
    shape = {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": LENGTH,
    }
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return [
        *changes_of(
            model or {**shape, **none, "vocab_size": VOCABULARY}, texts.corpus, STEPS, STEPS // 10
        ),
        f"zero_tp.data.sequence_length={LENGTH}",
        f"zero_tp.parallel.tensor={tensor}",
        f"train_micro_batch_size_per_gpu={BATCH}",
        "optimizer.params.lr=0.002",
        "zero_optimization.stage=2",
    ]


QUICKSTART = shipped_path(CONFIGS) / "quickstart.json"


# ---- what larger models learn --------------------------------------------------------------------


def learning(*, measured: bool) -> Reproduction:
    """The loss by size, and perplexity and last words of what was held out."""
    tables: dict[str, Table] = {}
    losses: dict[str, Sequence[float]] = {}
    if measured:
        with tempfile.TemporaryDirectory() as folder:
            texts = texts_in(Path(folder))
            rows: list[Row] = []
            for size in SIZES:
                table_rows, lines = learnt(size, texts, Path(folder) / size)
                rows += table_rows
                losses[table_rows[0].label.split(",")[0]] = lines
        tables[f"three sizes, {STEPS} steps of {BATCH} × {LENGTH} tokens on 2 ranks, TP 2"] = rows
    tables["WikiText-103 and LAMBADA, zero-shot (section 5.3)"] = [
        Row(f"{name}, {task}", unit, published=figure)
        for name, figures in ZERO_SHOT.items()
        for (task, unit), figure in zip(TASKS.items(), figures, strict=True)
    ]
    notes = (
        "Measured as the paper measures: perplexity by original tokens (T_o), and the last word of "
        "passages; both of",
        "held-out speeches of the shipped corpus. After a millionth of the paper's tokens the last "
        "words are chance. A",
        "single step's jump is the learning rate's, at its highest; transformers in one process "
        "has it too.",
    )
    draw = pictures.losses({"Training loss by size": losses}, "token")
    return Reproduction("What larger models learn (section 5.3)", tables, draw, notes)


def learnt(size: str, texts: Texts, directory: Path) -> tuple[list[Row], list[float]]:
    """Train a model of a size on two ranks; return what it knows, and its losses."""
    overrides = changes(size, texts, 2)
    _, lines = trained(QUICKSTART, overrides, 2, directory)
    data = {"wikitext103": texts.text, "lambada": texts.passages}
    tasks = evaluate(directory, list(data), data, EvaluationSettings())["tasks"]
    name = (
        f"{run_model_size(RunConfig.load(QUICKSTART, overrides, 2)).num_parameters / 1e6:.2f} M "
        "parameters"
    )
    losses = [line["loss"] for line in lines]
    return [
        Row(f"{name}, loss of the last 20 steps", "nats", sum(losses[-20:]) / 20),
        Row(f"{name}, perplexity as WikiText-103's", "", tasks["wikitext103"]["perplexity"]),
        Row(f"{name}, last words as LAMBADA's", "% right", 100 * tasks["lambada"]["accuracy"]),
    ], losses


# ---- the same model on any TP --------------------------------------------------------------------


def same_model(*, measured: bool) -> Reproduction:
    """One model on TP 1, 2 and 4, and transformers' own class in one process: the same losses."""
    tables: dict[str, Table] = {}
    losses: dict[str, Sequence[float]] = {}
    if measured:
        with tempfile.TemporaryDirectory() as folder:
            losses = losses_by_tensor(Path(folder))
        plain = losses["transformers, one process"]
        tables[f"furthest from transformers' loss in {STEPS} steps"] = [
            Row(name, "nats", max(abs(a - b) for a, b in zip(each, plain, strict=True)))
            for name, each in losses.items()
            if each is not plain
        ]
    tables["parameters of all TP ranks of 1.2 B together"] = [
        Row(
            f"TP {tensor}",
            "B",
            None,
            published.scaled(LARGE, tensor).model.num_parameters / 1e9,
            None,
            BILLIONS,
        )
        for tensor in (1, 2, 4, 8)
    ]
    notes = (
        "No dropout, fp32. All begin with the weights that transformers draws and see the same "
        "rows.",
    )
    draw = pictures.losses({"Training loss": losses}, "token")
    return Reproduction("The same model on TP 1, 2 and 4", tables, draw, notes)


def losses_by_tensor(folder: Path) -> dict[str, Sequence[float]]:
    """Train the same weights on TP 1, 2 and 4, and by transformers; return each one's losses."""
    texts = texts_in(folder)
    model = folder / "model"
    alone = RunConfig.load(QUICKSTART, changes("medium", texts, 1), 1)
    torch.manual_seed(alone.zero_tp.training.seed)
    AutoModelForCausalLM.from_config(alone.hf_config(), dtype=torch.float32).save_pretrained(model)
    losses: dict[str, Sequence[float]] = {}
    for tensor in (1, 2, 4):
        overrides = changes("medium", texts, tensor, from_pretrained=str(model))
        _, lines = trained(QUICKSTART, overrides, tensor, folder / f"tp{tensor}")
        losses[f"TP {tensor}"] = [line["loss"] for line in lines]
    losses["transformers, one process"] = plainly_trained(
        alone, model, [line["learning_rate"] for line in lines]
    )
    return losses
