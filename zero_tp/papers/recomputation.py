"""Results of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from zero_tp.config import RunConfig
from zero_tp.papers import formulas, layers, pictures, published
from zero_tp.papers.engines import small_config
from zero_tp.papers.layers import ALONE, LAYERS, SMALL, gpt2
from zero_tp.papers.ranks import on_ranks
from zero_tp.papers.reproduction import Reproduction
from zero_tp.papers.rows import Row, Table
from zero_tp.papers.steps import measured_steps, planned_steps, step_seconds
from zero_tp.planning import pictures as planning
from zero_tp.planning.dryrun import dry_run
from zero_tp.planning.formulas import Layer
from zero_tp.planning.memory import model_of
from zero_tp.planning.papers import PaperView
from zero_tp.planning.workload import Workload, workload_of

MIB = 2**20
RANKS = 2
GIB = 2**30
TIMED = Layer(s=512, b=2, h=768, a=12)
ROUNDS = 10


# ---- figure 1: memory of one device ----------------------------------------------------------------------------------

BEFORE_AND_NOW = ("TP", "TP, SP, selective")
TRAINED = ("zero_tp.attention=eager", f"zero_tp.parallel.tensor={RANKS}", "train_micro_batch_size_per_gpu=4")


def figure_1(*, measured: bool) -> Reproduction:
    """Model states and activations of one device, under TP alone and with both techniques."""
    tables: dict[str, Table] = {}
    stacks: dict[str, Mapping[str, float]] = {}
    if measured:
        heading = f"a small GPT-2 after forward: TP {RANKS} on CPU ranks, bf16"
        tables[heading] = [row for technique in BEFORE_AND_NOW for row in trained_rows(technique)]
    for name, run in published.MODELS.items():
        sizes = {technique: device_bytes(published.technique(run, technique)) for technique in BEFORE_AND_NOW}
        stacks |= {f"{name}, {technique}": each for technique, each in sizes.items()}
        tables[f"{name} on {run.devices} A100"] = [
            Row(f"{technique}: {kind}", "GiB", formula=size / GIB)
            for technique, each in sizes.items()
            for kind, size in states_and_activations(each).items()
        ]
    title = "Memory of one device (figure 1)"
    notes = ("By the paper's formulas, 16 bytes a parameter. Nothing published stands beside it.",)
    return Reproduction(title, tables, lambda: {"": planning.bars(title, stacks, published.A100.memory_gib)}, notes)


def trained_rows(technique: str) -> list[Row]:
    """Return what a rank holds after its first forward, in a real run beside the plan."""
    config = trained(technique)
    real, plan = (
        states_and_activations([point for point in steps["first step"] if point.phase == "forward"][-1].bytes)
        for steps in (measured_steps(config), planned_steps(config, cpu=True))
    )
    return [Row(f"{technique}: {kind}", "MiB", real[kind] / MIB, plan[kind] / MIB) for kind in real]


def states_and_activations(sizes: Mapping[str, float]) -> dict[str, float]:
    states = sum(sizes[kind] for kind in ("parameters", "gradients", "optimizer"))
    return {"model states": states, "activations": sizes["activations"]}


def trained(technique: str) -> RunConfig:
    """Return a run of two CPU ranks under a technique."""
    sequence, recompute = published.TECHNIQUES[technique]
    return small_config(RANKS, *TRAINED, f"zero_tp.parallel.sequence={sequence}", f"zero_tp.recompute={recompute}")


def device_bytes(run: published.Run) -> dict[str, float]:
    """Return the bytes of a first stage's device by category."""
    view = PaperView(run.model, workload_of(run.config, cpu=False), 0, 1, run.pipeline, run.interleaving)
    found = view.bytes()
    outside = found.pop("outside layers")
    return {**found, "activations": found["activations"] + outside}


# ---- table 2: bytes of one layer -------------------------------------------------------------------------------------


def table_2(*, measured: bool) -> Reproduction:
    """What one layer keeps of a micro-batch, on one rank."""
    notes = (
        "Measured: every storage that exists after a layer's forward because its backward will want it. Planned: a dry",
        "run with tensors that have no memory. Both count what the formula leaves out: statistics of norms.",
    )
    tables = layer_tables(measured, dry=("22 B",))
    return Reproduction("Activations that one layer keeps, by technique (table 2)", tables, notes=notes)


def layer_tables(measured: bool, dry: Sequence[str] = ()) -> dict[str, Table]:
    """Return table 2, in small and of each model.

    Args:
        dry: models to run dry besides.
    """
    tables: dict[str, Table] = {}
    if measured:
        found = on_ranks(layers.kept_bytes, RANKS)[0]
        heading = f"one layer in small: s {SMALL.s}, b {SMALL.b}, h {SMALL.h}, a {SMALL.a}, TP {RANKS}, bf16"
        tables[heading] = [
            layer_row(name, gpt2(SMALL, LAYERS), workload, measured=found[name] / MIB)
            for name, workload in layers.small_workloads(RANKS).items()
        ]
    for name, run in published.MODELS.items():
        mebibytes = (published.ALONE_MIB[name], *published.LAYER_MIB[name])
        tables[f"one layer of {name}, TP 8"] = [
            layer_row(technique, config.hf_config(), workload_of(config, cpu=False), published=each, dry=name in dry)
            for (technique, config), each in zip(layers_of(run).items(), mebibytes, strict=True)
        ]
    return tables


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


def layers_of(run: published.Run) -> dict[str, RunConfig]:
    """Return the rows of table 2 of a run."""
    alone = replace(published.technique(run, "TP"), devices=run.pipeline).changed("zero_tp.parallel.tensor=1")
    return {ALONE: alone.config} | {name: published.technique(run, name).config for name in published.TECHNIQUES}


# ---- figure 7: share of TP's memory ----------------------------------------------------------------------------------


def figure_7(*, measured: bool) -> Reproduction:
    """What a layer keeps, of what it keeps under TP alone."""
    tables = {heading: shares(rows) for heading, rows in layer_tables(measured).items()}
    title = "Activations of each technique, of those under TP alone (figure 7)"
    notes = ("Published: shares of the bytes of a layer that the paper's table 2 gives.",)
    return Reproduction(title, tables, lambda: {"": pictures.columns(title, tables, "% of TP alone")}, notes)


def shares(rows: Table) -> list[Row]:
    """Return each row's figures in per cent of those under TP alone."""
    whole = next(row for row in rows if row.label == "TP").figures
    return [
        Row(row.label, "%").having({name: 100 * value / whole[name] for name, value in row.figures.items()})
        for row in rows
        if row.label != ALONE
    ]


# ---- table 4: time of one layer --------------------------------------------------------------------------------------


def table_4(*, measured: bool) -> Reproduction:
    """Forward and backward of one layer, by technique."""
    tables: dict[str, Table] = {}
    times = on_ranks(measured_times, RANKS)[0] if measured else {}
    small = f"s {TIMED.s}, b {TIMED.b}, h {TIMED.h}, a {TIMED.a}, TP {RANKS} on CPU ranks, fp32"
    if measured:
        tables[f"one layer in small: {small}"] = [
            Row(f"{name}, {phase}", "ms", measured=1e3 * seconds)
            for name, each in times.items()
            for phase, seconds in zip(("forward", "backward"), layers.medians(each), strict=True)
        ]
        tables["its overhead, and what the technique adds to the FLOPs of products"] = [
            Row(name, "%", measured=100 * statistics.median(each), formula=100 * layers.added_flops(TIMED, name))
            for name, each in layers.overheads(times).items()
        ]
    planned = {name: published.technique(published.B22, name).time.layer.as_json() for name in published.TECHNIQUES}
    pairs = {name: (each["forward"], each["backward"]) for name, each in planned.items()}
    tables["one layer of 22 B on 8 A100"] = [
        Row(f"{name}, {phase}", "ms", planned=1e3 * seconds, published=there)
        for name, theirs in published.LAYER_MILLISECONDS.items()
        for phase, seconds, there in zip(("forward", "backward"), pairs[name], theirs, strict=True)
    ]
    tables["overhead on 8 A100"] = [
        Row(name, "%", planned=overhead(pairs, name), published=overhead(published.LAYER_MILLISECONDS, name))
        for name in published.TECHNIQUES
    ]
    notes = (
        "Overhead: both passes together against TP alone; measured, the median over rounds in turns.",
        "The planner knows accelerators, not CPU ranks, where SP's collectives cost what they save elsewhere.",
    )
    return Reproduction("Time of one layer, by technique (table 4)", tables, notes=notes)


def measured_times() -> layers.Times:
    """On each rank: seconds of a layer's passes."""
    return layers.measure(TIMED, torch.float32, torch.device("cpu"), ROUNDS)


def overhead(times: Mapping[str, tuple[float, float]], technique: str) -> float:
    """Return how much longer both passes together take than under TP alone [%]."""
    return 100 * (sum(times[technique]) / sum(times["TP"]) - 1)


# ---- table 5: time of an iteration -----------------------------------------------------------------------------------


def table_5(*, measured: bool) -> Reproduction:
    """Seconds of an iteration, MFU and HFU."""
    tables: dict[str, Table] = {}
    if measured:
        tables[f"a small GPT-2, TP {RANKS} on CPU ranks, bf16"] = measured_iterations()
    for name, run in published.MODELS.items():
        tables[f"{name} on {run.devices} A100"] = [*iteration_times(name, run), *utilisations(name, run)]
    notes = (
        "MFU and HFU are those of SP and selective recomputation; by formula, at the published time. The paper prints",
        "s/(3h) for the attention cores that run again (equation 8), and derives 4Bs²h a layer, which is 2s/(9h).",
    )
    return Reproduction("Time of an iteration, MFU and HFU (table 5)", tables, notes=notes)


def measured_iterations() -> list[Row]:
    full, selective = (on_ranks(step_seconds, RANKS, trained(name))[0] for name in ("TP, full", "TP, SP, selective"))
    return [
        Row("full recomputation", "s", measured=full),
        Row("SP and selective recomputation", "s", measured=selective),
        Row("more throughput", "%", measured=100 * (full / selective - 1)),
    ]


def iteration_times(name: str, run: published.Run) -> list[Row]:
    before, now = published.SECONDS[name]
    full, selective = published.technique(run, "TP, full").time.total, run.time.total
    return [
        Row("full recomputation", "s", planned=full, published=before),
        Row("SP and selective recomputation", "s", planned=selective, published=now),
        Row("more throughput", "%", planned=100 * (full / selective - 1), published=100 * (before / now - 1)),
    ]


def utilisations(name: str, run: published.Run) -> list[Row]:
    """Return what share of the devices' peak an iteration reaches, by each count of its FLOPs."""
    spec, length = run.model.spec, run.config.zero_tp.data.sequence_length
    counts = {
        "MFU": formulas.model_flops,
        "HFU, as printed": formulas.hardware_flops_selective,
        "HFU, as derived": formulas.hardware_flops_selective_derived,
    }
    theirs: tuple[float | None, ...] = (*published.UTILISATION[name], None)
    rows = []
    for (label, count), there in zip(counts.items(), theirs, strict=True):
        flops = count(run.config.global_batch, length, spec.layers, spec.hidden, spec.vocabulary)
        of_peak = 100 * flops / run.devices / peak(run)
        seconds = published.SECONDS[name][1]
        rows.append(Row(label, "%", planned=of_peak / run.time.total, formula=of_peak / seconds, published=there))
    return rows


def peak(run: published.Run) -> float:
    """Return the FLOP/s of one device, on paper."""
    teraflops = run.device.tflops(run.config.dtype)
    assert teraflops is not None
    return 1e12 * teraflops


# ---- appendix C: some micro-batches keep everything ------------------------------------------------------------------


KEPT = 2
"""Micro-batches that keep everything, in small."""


def appendix_c(*, measured: bool) -> Reproduction:
    """Memory and time where some micro-batches keep all their activations, and the others recompute selectively."""
    tables: dict[str, Table] = {}
    if measured:
        heading = f"one layer of {layers.MICRO_BATCHES} micro-batches in turn, {KEPT} kept whole: TP {RANKS}, SP, bf16"
        tables[heading] = micro_batches(on_ranks(layers.kept_by_micro_batch, RANKS, KEPT)[0])
    memory = published.A100.memory_gib
    curves = {}
    for name in ("175 B", "530 B"):
        run = published.MODELS[name]
        again = run.time.total - published.technique(run, "TP, SP").time.total
        points = [
            (stage_bytes(run, kept) / GIB, run.time.total - kept / run.pipeline * again)
            for kept in range(run.pipeline + 1)
        ]
        most = max(kept for kept, (size, _) in enumerate(points) if size <= memory)
        curves[name] = points
        shown = {0: "", most: "the most that fit", run.pipeline: ""}
        tables[f"{name} on {run.devices} A100 of {memory:g} GiB, first of {run.pipeline} stages"] = [
            row for kept, note in shown.items() for row in stage_rows(run, kept, *points[kept], note)
        ]
    notes = (
        "Runs have no pipeline: of an accumulation's micro-batches one is there at a time, so the peak is that of a",
        "whole one as soon as one is kept. Of p in flight on a first stage the paper's view keeps N; of the time that",
        "recomputation costs, N/p goes. Model states are counted as 16 bytes a parameter.",
    )
    title = "Some micro-batches keep all their activations (appendix C)"
    return Reproduction(title, tables, lambda: {"": pictures.kept_micro_batches(title, curves, memory)}, notes)


def micro_batches(found: Sequence[int]) -> list[Row]:
    """Return what was measured of each micro-batch beside dry runs of both kinds."""
    at = layers.small_workloads(RANKS)
    planned = [layer_in_dry_run(gpt2(SMALL, LAYERS), at[name]) / MIB for name in ("TP, SP", "TP, SP, selective")]
    return [
        Row(f"micro-batch {index + 1}", "MiB", measured=size / MIB, planned=planned[index >= KEPT])
        for index, size in enumerate(found)
    ]


def stage_bytes(run: published.Run, kept: int) -> float:
    """Return the bytes of a first stage's device where `kept` micro-batches, of p in flight, keep everything."""
    at = replace(workload_of(run.config, cpu=False), policy=layers.policy_of("selective", kept))
    return sum(PaperView(run.model, at, 0, 1, run.pipeline, run.interleaving).bytes().values())


def stage_rows(run: published.Run, kept: int, size: float, seconds: float, note: str) -> list[Row]:
    label = f"{kept} of {run.pipeline} kept"
    return [
        Row(f"{label}, memory", "GiB", planned=size, note=note),
        Row(f"{label}, iteration", "s", planned=seconds),
        Row(f"{label}, MFU", "%", planned=100 * run.speed * run.time.total / seconds / peak(run)),
    ]
