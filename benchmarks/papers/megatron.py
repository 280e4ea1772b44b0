"""Results of Megatron-LM (arXiv 1909.08053): sizes, scaling, learning by size, and equal losses
at any TP degree.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import transformers

from benchmarks.papers import formulas, published
from benchmarks.papers.engines import ONE_MICRO_BATCH, small_config
from benchmarks.papers.megatron_norms import norm_order
from benchmarks.papers.megatron_training import learning, same_model
from benchmarks.papers.published import B8_3, scaled
from benchmarks.papers.ranks import on_ranks
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row, Table, rows
from benchmarks.papers.steps import step_seconds
from zero_tp.base.shipped import CONFIGS, shipped_path
from zero_tp.model.architectures import native_class_of
from zero_tp.parallel.devices import named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import run_model_size
from zero_tp.tools.planning.plan import plan

__all__ = ["learning", "norm_order", "same_model", "scaling", "sizes"]

SCALED = {
    "1.2 B": ("papers/gpt2_1.2b.json", 1, 16, 1.213),
    "2.5 B": ("gpt2_2.5b.json", 2, 20, 2.490),
    "4.2 B": ("papers/gpt2_4.2b.json", 4, 24, 4.199),
    "8.3 B": ("gpt2_8.3b.json", 8, 32, 8.317),
}
"""The scaling study: file, MP, heads, billions of parameters (table 1)."""
TRAINED = {
    "GPT-2, 355 M": ("gpt2_355m", 355),
    "BERT, 336 M": ("bert_336m", 336),
    "BERT, 1.3 B": ("bert_1.3b", 1300),
    "BERT, 3.9 B": ("bert_3.9b", 3900),
}
"""File, and millions of parameters, rounded."""
# Percent of the FLOP/s of the 1.2 B model on one device (section 5.1; by heads appendix D), and its
# speed-up there.
WEAK = {"8.3 B, MP 8": 77, "8.3 B, MP 8 × DP 64": 74}
HEADS = {"16 heads": 82, "32 heads": 77}
SPEED_UP = {"2 devices": 1.64}
ALONE_TFLOPS = 39


# ---- table 1: sizes ------------------------------------------------------------------------------


def sizes(*, measured: bool) -> Reproduction:
    """Parameters of every model, compared with transformers' own class."""
    study = []
    for name, (file, tensor, heads, billions) in SCALED.items():
        run = scaled(file, tensor, heads=heads)
        model = run.config.hf_config()
        formula = formulas.gpt_parameters(
            model.n_layer, model.n_embd, model.vocab_size, model.n_positions
        )
        counted = native_parameters(run.config) / 1e9 if measured else None
        study.append(
            Row(
                f"{name}, MP {tensor}",
                "B",
                counted,
                run.model.num_parameters / 1e9,
                formula / 1e9,
                billions,
            )
        )
    trained = []
    for name, (file, millions) in TRAINED.items():
        config = RunConfig.load(shipped_path(CONFIGS) / f"{file}.json", ONE_MICRO_BATCH, 8)
        counted = native_parameters(config) / 1e6 if measured else None
        trained.append(
            Row(name, "M", counted, run_model_size(config).num_parameters / 1e6, published=millions)
        )
    tables: dict[str, Table] = {"scaling study (table 1)": study, "models that it trained": trained}
    notes = (
        "Measured: counted in transformers' own class. BERT's 1.3 and 3.9 B are rounded in the "
        "paper.",
    )
    return Reproduction("Parameters (table 1)", tables, notes=notes)


def native_parameters(config: RunConfig) -> int:
    """Count the parameters of transformers' own class; tied ones count once."""
    model = copy.deepcopy(config.hf_config())
    model._attn_implementation = "eager"  # the only one that MegatronBert has
    with torch.device("meta"):
        native: Any = getattr(transformers, native_class_of(model))(model)
    return sum(parameter.numel() for parameter in native.parameters())


# ---- figure 5 and appendix D: scaling ------------------------------------------------------------

BATCH = (
    "train_micro_batch_size_per_gpu=8",
    "zero_optimization.stage=0",
    "zero_tp.parallel.sequence=false",
)
ALONE = "zero_tp.model.n_embd=320"
TWICE = "zero_tp.model.n_embd=480"
"""A model with almost twice the parameters, for two ranks."""


def scaling(*, measured: bool) -> Reproduction:
    """Weak scaling, strong scaling and attention heads: planned, and measured on two ranks of
    this machine.
    """
    one = SCALED["1.2 B"][0]
    weak = {
        f"{name}, MP {tensor}{beside}": share(file, tensor, data, heads)
        for data, beside in ((1, ""), (64, " × DP 64"))
        for name, (file, tensor, heads, _) in SCALED.items()
    }
    strong = {
        f"{tensor} devices": published.B1_2.time.total / scaled(one, tensor).time.total
        for tensor in (2, 4, 8)
    }
    by_heads = {f"{heads} heads": share(B8_3, 8, 1, heads) for heads in (16, 24, 32)}
    alone = published.B1_2.speed / 1e12
    tables: dict[str, Table] = (
        {"in small: 1 and 2 ranks of this machine": scaled_in_small()} if measured else {}
    )
    tables |= {
        "1.2 B on one V100 (section 5.1)": [
            Row("the model's FLOPs", "TFLOP/s", None, alone, None, ALONE_TFLOPS)
        ],
        "weak scaling (figure 5): FLOP/s of a device": rows(
            "%", {"planned": weak, "published": WEAK}
        ),
        "strong scaling of 1.2 B, the same batch (appendix D)": rows(
            "×", {"planned": strong, "published": SPEED_UP}
        ),
        "heads of 8.3 B, MP 8 (appendix D): FLOP/s of a device": rows(
            "%", {"planned": by_heads, "published": HEADS}
        ),
    }
    notes = (
        "100 %: the 1.2 B model on one V100, in small the smaller model on one rank. Planned with "
        "the paper's machine",
        "and what its program does otherwise (docs/planning.md). In small the plan knows little of "
        "a CPU's rates.",
    )
    return Reproduction("Scaling (figure 5, appendix D)", tables, notes=notes)


def share(file: str, tensor: int, data: int, heads: int) -> float:
    """Return the FLOP/s per device relative to the 1.2 B model on one device [%]."""
    return 100 * scaled(file, tensor, data, heads=heads).speed / published.B1_2.speed


class Step(NamedTuple):
    """The measured and planned seconds of a step, and the FLOPs of a rank."""

    seconds: float
    planned: float
    flops: float


def scaled_in_small() -> list[Row]:
    """Compare a model on one rank with one of twice the size and with itself on two ranks, and
    numbers of heads.
    """
    device = named_device("cpu", 2)

    def both(ranks: int, *changes: str) -> Step:
        config = small_config(ranks, *BATCH, f"zero_tp.parallel.tensor={ranks}", *changes)
        seconds = max(on_ranks(step_seconds, ranks, config))
        planned = plan(config, device)
        return Step(seconds, planned.time.total, planned.model_flops / ranks)

    alone = both(1, ALONE)
    wide = both(2, TWICE)
    split = both(2, ALONE)
    heads = {number: both(2, TWICE, f"zero_tp.model.n_head={number}") for number in (4, 8, 16)}

    def row(label: str, unit: str, slow: Step, fast: Step, share: float) -> Row:
        """Return `share` times the ratio of two steps' seconds."""
        return Row(
            label, unit, share * slow.seconds / fast.seconds, share * slow.planned / fast.planned
        )

    return [
        row("weak: twice the model, TP 2", "%", alone, wide, 100 * wide.flops / alone.flops),
        row("strong: the same model, TP 2", "×", alone, split, 1),
        *(
            row(f"{n} heads, TP 2: speed of 4 heads", "%", heads[4], each, 100)
            for n, each in heads.items()
        ),
    ]
