"""Results of "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.papers import formulas, layers, pictures, published
from benchmarks.papers.engines import of_layers, small_config, view_of
from benchmarks.papers.ranks import on_ranks
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Columns, Row, Table, rows
from benchmarks.papers.steps import after_forward, measured_steps, planned_steps, step_seconds
from zero_tp.base.constants import GIB, MIB
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.plan_settings import Layer, workload_of

RANKS = 2
TIMED = Layer(s=512, b=2, h=768, a=12)
ROUNDS = 10


# ---- figure 1: memory of one device --------------------------------------------------------------

BEFORE_AND_NOW = ("TP", "TP, SP, selective")


def figure_1(*, measured: bool) -> Reproduction:
    """Model states and activations of one device, under TP alone and with both techniques."""
    tables: dict[str, Table] = {}
    stacks: dict[str, Mapping[str, float]] = {}
    if measured:
        heading = f"a small GPT-2 after forward: TP {RANKS} on CPU ranks, bf16"
        configs = {name: trained(name) for name in BEFORE_AND_NOW}
        real = {
            name: after_forward(measured_steps(each)["first step"])
            for name, each in configs.items()
        }
        plan = {
            name: after_forward(planned_steps(each, cpu=True)["first step"])
            for name, each in configs.items()
        }
        tables[heading] = rows("MiB", {"measured": by_kind(real), "planned": by_kind(plan)}, MIB)
    for name, run in published.MODELS.items():
        sizes = {technique: device_bytes(run.under(technique)) for technique in BEFORE_AND_NOW}
        stacks |= {f"{name}, {technique}": each for technique, each in sizes.items()}
        tables[f"{name} on {run.devices} A100"] = rows("GiB", {"formula": by_kind(sizes)}, GIB)
    title = "Memory of one device (figure 1)"
    notes = ("By the paper's formulas, 16 bytes a parameter. Nothing published stands beside it.",)
    return Reproduction(
        title,
        tables,
        lambda: {"": pictures.memory_bars(title, stacks, published.A100.memory_gib)},
        notes,
    )


def by_kind(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Sum each technique's bytes by category into model states and activations."""
    states = ("parameters", "gradients", "optimizer")
    kinds = {
        name: {
            "model states": sum(sizes[kind] for kind in states),
            "activations": sizes["activations"],
        }
        for name, sizes in times.items()
    }
    return {
        f"{name}: {kind}": size for name, sizes in kinds.items() for kind, size in sizes.items()
    }


def trained(technique: str) -> RunConfig:
    """Return the config of a run of two CPU ranks with a technique."""
    tensor = f"zero_tp.parallel.tensor={RANKS}"
    changes = ("zero_tp.attention=eager", tensor, "train_micro_batch_size_per_gpu=4")
    return small_config(RANKS, *changes, *published.technique(technique))


def device_bytes(run: published.Run) -> dict[str, float]:
    """Return the bytes of a first stage's device by category."""
    sizes = run.view.bytes()
    outside = sizes.pop("outside layers")
    return {**sizes, "activations": sizes["activations"] + outside}


# ---- table 2: bytes of one layer -----------------------------------------------------------------

ALONE = "no parallelism"
SMALL = Layer(s=512, b=2, h=512, a=8)
"""The layer that is measured."""


def table_2(*, measured: bool) -> Reproduction:
    """Activations that one layer keeps of a micro-batch on one rank."""
    notes = (
        "Measured: every storage that exists after a layer's forward because its backward will "
        "want it. Planned: a dry",
        "run with tensors that have no memory. Both count what the formula leaves out: statistics "
        "of norms.",
    )
    tables = layer_tables(measured, dry=("22 B",))
    return Reproduction(
        "Activations that one layer keeps, by technique (table 2)", tables, notes=notes
    )


def layer_tables(measured: bool, dry: Sequence[str] = ()) -> dict[str, Table]:
    """Return table 2 of the small layer and of each model.

    Args:
        dry: models that also get a dry run.
    """
    tables: dict[str, Table] = {}
    if measured:
        configs = {
            ALONE: of_layers(SMALL, RANKS, *published.technique("TP"), "zero_tp.parallel.tensor=1")
        }
        configs |= {
            name: of_layers(SMALL, RANKS, *published.technique(name))
            for name in published.TECHNIQUES
        }
        heading = (
            f"one layer in small: s {SMALL.s}, b {SMALL.b}, h {SMALL.h}, a {SMALL.a}, TP {RANKS}, "
            "bf16"
        )
        columns: Columns = {
            "measured": on_ranks(layers.kept_bytes, RANKS, configs)[0],
            "planned": {
                name: layer_in_dry_run(config, cpu=True) for name, config in configs.items()
            },
            "formula": {
                name: view_of(config).layer_bytes(recomputes=True)
                for name, config in configs.items()
            },
        }
        tables[heading] = rows("MiB", columns, MIB)
    for name, run in published.MODELS.items():
        alone = replace(run.under("TP"), devices=run.pipeline).changed("zero_tp.parallel.tensor=1")
        runs = {ALONE: alone} | {
            technique: run.under(technique) for technique in published.TECHNIQUES
        }
        columns = {
            "planned": {
                label: layer_in_dry_run(each.config, cpu=False)
                for label, each in runs.items()
                if name in dry
            },
            "formula": {
                label: each.view.layer_bytes(recomputes=True) for label, each in runs.items()
            },
            "published": dict(zip(runs, published.LAYER_MIB[name], strict=True)),
        }
        tables[f"one layer of {name}, TP 8"] = rows("MiB", columns, MIB)
    return tables


def layer_in_dry_run(config: RunConfig, *, cpu: bool) -> float:
    """Return one layer's activations in a dry run: those at the third layer's start minus the
    second's.
    """
    moments = dry_run(config.hf_config(), workload_of(config, cpu=cpu))
    second, third = (
        next(one.activations for one in moments if one.layer == number) for number in (1, 2)
    )
    return third - second


# ---- figure 7: share of TP's memory --------------------------------------------------------------


def figure_7(*, measured: bool) -> Reproduction:
    """Activations of one layer relative to TP alone."""
    tables = {heading: shares(rows) for heading, rows in layer_tables(measured).items()}
    title = "Activations of each technique, of those under TP alone (figure 7)"
    notes = ("Published: shares of the bytes of a layer that the paper's table 2 gives.",)
    return Reproduction(
        title, tables, lambda: {"": pictures.columns(title, tables, "% of TP alone")}, notes
    )


def shares(table: Table) -> list[Row]:
    """Return each row's figures as percentages of TP alone."""
    whole = next(row for row in table if row.label == "TP").figures
    return [
        Row(row.label, "%").having(
            {name: 100 * value / whole[name] for name, value in row.figures.items()}
        )
        for row in table
        if row.label != ALONE
    ]


# ---- table 4: time of one layer ------------------------------------------------------------------


def table_4(*, measured: bool) -> Reproduction:
    """Forward and backward of one layer, by technique."""
    tables: dict[str, Table] = {}
    small = f"s {TIMED.s}, b {TIMED.b}, h {TIMED.h}, a {TIMED.a}, TP {RANKS} on CPU ranks, fp32"
    if measured:
        once = ("zero_tp.model.n_layer=1", "bf16.enabled=false")
        configs = {
            name: of_layers(TIMED, RANKS, *once, *published.technique(name))
            for name in published.TECHNIQUES
        }
        times = on_ranks(layers.measure, RANKS, configs, ROUNDS)[0]
        tables[f"one layer in small: {small}"] = rows("ms", {"measured": passes(times)}, 1e-3)
        added = {name: layers.added_flops(TIMED, name) for name in times}
        tables["its overhead, and what the technique adds to the FLOPs of products"] = rows(
            "%", {"measured": overheads(times), "formula": added}, 0.01
        )
    planned: layers.Times = {}
    for name in published.TECHNIQUES:
        layer = published.B22.under(name).time.layer.as_json()
        planned[name] = [(1e3 * layer["forward"], 1e3 * layer["backward"])]
    theirs = {name: [milliseconds] for name, milliseconds in published.LAYER_MILLISECONDS.items()}
    tables["one layer of 22 B on 8 A100"] = rows(
        "ms", {"published": passes(theirs), "planned": passes(planned)}
    )
    shown = {name: 100 * share for name, share in overheads(theirs).items()}
    tables["overhead on 8 A100"] = rows(
        "%", {"planned": overheads(planned), "published": shown}, 0.01
    )
    notes = (
        "Overhead: both passes together against TP alone; measured, the median over rounds in "
        "turns.",
        "The planner knows accelerators, not CPU ranks, where SP's collectives cost what they save "
        "elsewhere.",
    )
    return Reproduction("Time of one layer, by technique (table 4)", tables, notes=notes)


def passes(times: layers.Times) -> dict[str, float]:
    """Return the median times of each pass."""
    pairs = {name: layers.medians(each) for name, each in times.items()}
    return {
        f"{name}, {phase}": pair[at]
        for name, pair in pairs.items()
        for at, phase in enumerate(layers.PASSES)
    }


def overheads(times: layers.Times) -> dict[str, float]:
    """Return the median overhead of both passes relative to TP alone."""
    return {name: statistics.median(each) for name, each in layers.overheads(times).items()}


# ---- table 5: time of an iteration ---------------------------------------------------------------

NOW = "SP and selective recomputation"
UNDER = {"full recomputation": "TP, full", NOW: "TP, SP, selective"}
"""Label → technique of the timed runs."""


def table_5(*, measured: bool) -> Reproduction:
    """Seconds of an iteration, MFU and HFU."""
    tables: dict[str, Table] = {}
    if measured:
        times = {
            label: on_ranks(step_seconds, RANKS, trained(name))[0] for label, name in UNDER.items()
        }
        tables[f"a small GPT-2, TP {RANKS} on CPU ranks, bf16"] = iterations({"measured": times})
    for name, run in published.MODELS.items():
        seconds = {
            "planned": {
                label: run.under(technique).time.total for label, technique in UNDER.items()
            },
            "published": dict(zip(UNDER, published.SECONDS[name], strict=True)),
        }
        tables[f"{name} on {run.devices} A100"] = [*iterations(seconds), *utilisations(name, run)]
    more = published.B530_DP8
    tables[f"530 B on {more.devices:,} A100, DP 8 (section 6.3)"] = [
        Row(NOW, "s", planned=more.time.total, published=published.SECONDS_DP8)
    ]
    notes = (
        "MFU and HFU are those of SP and selective recomputation; by formula, at the published "
        "time. The paper prints",
        "s/(3h) for the attention cores that run again (equation 8), and derives 4Bs²h a layer, "
        "which is 2s/(9h).",
    )
    return Reproduction("Time of an iteration, MFU and HFU (table 5)", tables, notes=notes)


def iterations(columns: Columns) -> list[Row]:
    """Return the rows of an iteration's seconds, and of what the second technique gains over the
    first.
    """
    more = {}
    for column, seconds in columns.items():
        before, now = seconds.values()
        more[column] = {"more throughput": 100 * (before / now - 1)}
    return [*rows("s", columns), *rows("%", more)]


def utilisations(name: str, run: published.Run) -> list[Row]:
    """Return what share of the devices' peak an iteration reaches, by each count of its FLOPs."""
    spec = run.model.spec
    length = run.config.zero_tp.data.sequence_length
    sizes = (run.config.global_batch, length, spec.layers, spec.hidden, spec.vocabulary)
    cores = {
        "MFU": formulas.MODEL,
        "HFU, as printed": formulas.SELECTIVE,
        "HFU, as derived": formulas.DERIVED,
    }
    shares = {
        label: formulas.iteration_flops(*sizes, share) / run.devices / run.peak
        for label, share in cores.items()
    }
    columns = {
        "planned": {label: share / run.time.total for label, share in shares.items()},
        "formula": {label: share / published.SECONDS[name][1] for label, share in shares.items()},
        "published": dict(zip(shares, published.UTILISATION[name], strict=False)),
    }
    return rows("%", columns, 0.01)


# ---- appendix C: some micro-batches keep everything ----------------------------------------------


MICRO_BATCHES = 4
KEPT = 2
"""Micro-batches of the small run, and how many of them keep everything."""


def appendix_c(*, measured: bool) -> Reproduction:
    """Memory and time if some micro-batches keep all activations, and the others recompute
    selectively.
    """
    tables: dict[str, Table] = {}
    if measured:
        heading = (
            f"one layer of {MICRO_BATCHES} micro-batches in turn, {KEPT} kept whole: TP {RANKS}, "
            "SP, bf16"
        )
        tables[heading] = micro_batches()
    memory = published.A100.memory_gib
    curves = {}
    for name in ("175 B", "530 B"):
        run = published.MODELS[name]
        again = run.time.total - run.under("TP, SP").time.total
        points = [
            (stage_bytes(run, kept) / GIB, run.time.total - kept / run.pipeline * again)
            for kept in range(run.pipeline + 1)
        ]
        most = max(kept for kept, (size, _) in enumerate(points) if size <= memory)
        curves[name] = points
        shown = {0: "", most: "the most that fit", run.pipeline: ""}
        tables[
            f"{name} on {run.devices} A100 of {memory:g} GiB, first of {run.pipeline} stages"
        ] = [
            row
            for kept, note in shown.items()
            for row in stage_rows(run, kept, *points[kept], note)
        ]
    notes = (
        "Runs have no pipeline: of an accumulation's micro-batches one is there at a time, so the "
        "peak is that of a",
        "whole one as soon as one is kept. Of p in flight on a first stage the paper's view keeps "
        "N; of the time that",
        "recomputation costs, N/p goes. Model states are counted as 16 bytes a parameter.",
    )
    title = "Some micro-batches keep all their activations (appendix C)"
    return Reproduction(
        title, tables, lambda: {"": pictures.kept_micro_batches(title, curves, memory)}, notes
    )


def micro_batches() -> list[Row]:
    """Return measured and planned activations of each micro-batch."""
    mixed = f'zero_tp.recompute={{"mode": "selective", "keep_micro_batches": {KEPT}}}'
    steps = f"gradient_accumulation_steps={MICRO_BATCHES}"
    measured = on_ranks(
        layers.kept_by_micro_batch,
        RANKS,
        of_layers(SMALL, RANKS, "zero_tp.parallel.sequence=true", mixed, steps),
    )[0]
    kinds = ["TP, SP"] * KEPT + ["TP, SP, selective"] * (MICRO_BATCHES - KEPT)
    dry = {
        kind: layer_in_dry_run(of_layers(SMALL, RANKS, *published.technique(kind)), cpu=True)
        for kind in kinds
    }
    names = [f"micro-batch {number}" for number in range(1, MICRO_BATCHES + 1)]
    planned = {name: dry[kind] for name, kind in zip(names, kinds, strict=True)}
    return rows(
        "MiB", {"measured": dict(zip(names, measured, strict=True)), "planned": planned}, MIB
    )


def stage_bytes(run: published.Run, kept_micro_batches: int) -> float:
    """Return the bytes of a first stage's device if `kept_micro_batches` of p in flight keep
    everything.
    """
    at = run.view.workload
    mixed = replace(
        at, policy=at.policy.model_copy(update={"keep_micro_batches": kept_micro_batches})
    )
    return sum(replace(run.view, workload=mixed).bytes().values())


def stage_rows(
    run: published.Run, kept_micro_batches: int, size: float, seconds: float, note: str
) -> list[Row]:
    label = f"{kept_micro_batches} of {run.pipeline} kept"
    return [
        Row(f"{label}, memory", "GiB", planned=size, note=note),
        Row(f"{label}, iteration", "s", planned=seconds),
        Row(f"{label}, MFU", "%", planned=100 * run.speed * run.time.total / seconds / run.peak),
    ]
