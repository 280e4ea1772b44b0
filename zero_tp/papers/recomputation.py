"""Results of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import GPT2Config

from zero_tp.activations.memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.config import RunConfig
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.papers import published
from zero_tp.papers.kept import kept_by_layer
from zero_tp.papers.ranks import on_ranks
from zero_tp.papers.reproduction import Reproduction
from zero_tp.papers.rows import Row
from zero_tp.planning.dryrun import dry_run
from zero_tp.planning.formulas import Layer
from zero_tp.planning.memory import model_of
from zero_tp.planning.papers import PaperView
from zero_tp.planning.workload import Workload, workload_of
from zero_tp.topology import Topology

MIB = 2**20
RANKS = 2
ALONE = "no parallelism"
SMALL = Layer(s=512, b=2, h=512, a=8)


def small_config(layer: Layer) -> GPT2Config:
    """Return a GPT-2 of four such layers, as the paper's: dropout everywhere, attention not fused."""
    config = GPT2Config(
        n_layer=4,
        n_embd=layer.h,
        n_head=layer.a,
        n_positions=layer.s,
        vocab_size=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    config._attn_implementation = "eager"
    return config


# ---- table 2: bytes of one layer -------------------------------------------------------------------------------------


def table_2(*, measured: bool) -> Reproduction:
    """What one layer keeps of a micro-batch, on one rank."""
    tables = {}
    if measured:
        found = on_ranks(measured_bytes, RANKS)[0]
        heading = f"one layer in small: s {SMALL.s}, b {SMALL.b}, h {SMALL.h}, a {SMALL.a}, TP {RANKS}, bf16"
        tables[heading] = [
            layer_row(name, small_config(SMALL), workload, measured=found[name] / MIB)
            for name, workload in small_workloads().items()
        ]
    for name, run in published.MODELS.items():
        mebibytes = (published.ALONE_MIB[name], *published.LAYER_MIB[name])
        tables[f"one layer of {name}, TP 8"] = [
            layer_row(technique, config.hf_config(), workload_of(config, cpu=False), published=each, dry=name == "22 B")
            for (technique, config), each in zip(layers_of(run).items(), mebibytes, strict=True)
        ]
    notes = (
        "Measured: every storage that exists after a layer's forward because its backward will want it. Planned: a dry",
        "run with tensors that have no memory. Both count what the formula leaves out: statistics of norms.",
    )
    return Reproduction("Activations that one layer keeps, by technique (table 2)", tables, notes=notes)


def layer_row(
    label: str,
    config: Any,
    workload: Workload,
    *,
    measured: float | None = None,
    published: float | None = None,
    dry: bool = True,
) -> Row:
    """Return what one layer of a model keeps by the formula, and by a dry run."""
    view = PaperView(model_of(config, workload.tensor, workload.sequence), workload, stage=0, data=1)
    planned = layer_in_dry_run(config, workload) / MIB if dry else None
    return Row(label, "MiB", measured, planned, view.layer_bytes(recomputes=True) / MIB, published)


def layer_in_dry_run(config: Any, workload: Workload) -> float:
    """Return what one layer keeps in a dry run: how much more there is when the third begins than at the second."""
    moments = dry_run(config, workload)
    second, third = (next(one.activations for one in moments if one.layer == number) for number in (1, 2))
    return third - second


def small_workloads() -> dict[str, Workload]:
    """Return the rows of table 2, in small."""
    rows = {ALONE: (1, "false", "none")} | {name: (RANKS, *each) for name, each in published.TECHNIQUES.items()}
    return {
        name: Workload(
            SMALL.s,
            SMALL.b,
            tensor,
            sequence == "true",
            cpu=True,
            policy=RecomputePolicy.model_validate({"mode": mode}),
        )
        for name, (tensor, sequence, mode) in rows.items()
    }


def measured_bytes() -> dict[str, int]:
    """On each rank: the bytes of all that one layer keeps, by row."""
    found = {}
    for name, workload in small_workloads().items():
        topology = Topology(workload.tensor, workload.sequence)
        model = ZeroTPForCausalLM(small_config(SMALL), topology, dtype=torch.bfloat16).train()
        ActivationMemory(model, workload.policy, {}, torch.device("cpu"))
        found[name] = sum(storage.bytes for storage in kept_by_layer(model, 1, workload.length, workload.batch))
    return found


def layers_of(run: published.Run) -> dict[str, RunConfig]:
    """Return the rows of table 2 of a run."""
    alone = replace(published.technique(run, "TP"), devices=run.pipeline).changed("zero_tp.parallel.tensor=1")
    return {ALONE: alone.config} | {name: published.technique(run, name).config for name in published.TECHNIQUES}
