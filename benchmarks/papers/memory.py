"""Where training memory goes: over the time of a step, by length and batch, by dtype, by
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from benchmarks.papers import pictures
from benchmarks.papers.engines import built, drawn, kept_by_formula, left_by_forward, view_of
from benchmarks.papers.kept import kept_by_backward
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Columns, Row, Table, rows
from benchmarks.papers.steps import Steps
from benchmarks.papers.studied import CORES, GPT2, Case, cases
from zero_tp.base.constants import MIB
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning.memory import Point, run_model_size
from zero_tp.tools.planning.pictures import memory_over_time

STATES = ("parameters", "gradients", "optimizer")
RECOMPUTED = ("none", "selective", "full")
DTYPES: dict[str, tuple[tuple[str, ...], float]] = {
    "fp32": (("bf16.enabled=false", "zero_optimization.stage=0"), 16),
    "bf16": (("bf16.enabled=true",), 16),
    "bf16, gradients in fp32": (
        ("bf16.enabled=true", "data_types.grad_accum_dtype=fp32", "gradient_accumulation_steps=2"),
        20,
    ),
}
"""Overrides of the config, and the study's bytes per parameter."""


def states(points: Sequence[Point]) -> dict[str, float]:
    """Return the bytes of model states and buffers after backward."""
    last = before_update(points)[-1].bytes
    return {name: last[name] for name in (*STATES, "buffers")}


def before_update(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if point.phase != "step"]


def most_activations(points: Sequence[Point]) -> float:
    return max(point.bytes["activations"] for point in points)


def peak(points: Sequence[Point]) -> Point:
    return max(points, key=lambda point: point.total)


MOMENTS: dict[str, Callable[[Sequence[Point]], float]] = {
    "parameters": lambda points: points[0].bytes["parameters"],
    "optimizer states before the update": lambda points: points[0].bytes["optimizer"],
    "optimizer states after it": lambda points: points[-1].bytes["optimizer"],
    "gradients after backward": lambda points: states(points)["gradients"],
    "activations at their most": most_activations,
    "peak of forward and backward": lambda points: peak(before_update(points)).total,
    "peak of the update": lambda points: (
        peak([point for point in points if point.phase == "step"]).total
    ),
}
MOST = {"activations at their most": most_activations, "peak": lambda points: peak(points).total}


def figure_rows(
    figures: Mapping[str, Callable[[Sequence[Point]], float]],
    of: str,
    steps: Mapping[str, Sequence[Point]],
) -> list[Row]:
    """Return a row for each figure, computed from each column's step."""
    columns = {
        column: {f"{of}: {label}": figure(points) for label, figure in figures.items()}
        for column, points in steps.items()
    }
    return rows("MiB", columns, MIB)


# ---- over time -----------------------------------------------------------------------------------


def over_time(*, measured: bool) -> Reproduction:
    """Memory over the first and later steps, by category."""
    tables: dict[str, Table] = {}
    shown: dict[str, tuple[str, Steps]] = {}
    for case in cases(measured):
        found = case.steps()
        heading = f"{case.heading}, bf16" if case.small else case.heading
        tables[heading] = [
            row
            for number, name in enumerate(found["planned"])
            for row in figure_rows(
                MOMENTS,
                name,
                {column: list(steps.values())[number] for column, steps in found.items()},
            )
        ]
        for column, steps in found.items():
            file = f"{case.model.key}_{column}" if case.small else case.model.key
            shown[file] = f"{heading}, {column}", steps
    notes = (
        "The optimizer makes its moments in the first update: until then a new run has its masters "
        "alone. A later",
        "update peaks before, where gradients are there as they were made, flat and in fp32 beside "
        "the moments.",
    )

    def draw() -> dict[str, Any]:
        return {
            f"{name}_{step.replace(' ', '_')}": memory_over_time(
                {f"{title}, {step}": (points, None)}
            )
            for name, (title, steps) in shown.items()
            for step, points in steps.items()
        }

    return Reproduction("Memory over time, by category", tables, draw, notes)


# ---- by length and batch -------------------------------------------------------------------------

LENGTHS = (128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8)
LONG = (1024, 2048, 4096, 6144, 8192)


def by_length(*, measured: bool) -> Reproduction:
    """Activations of a whole model after forward, by sequence length and batch."""
    tables: dict[str, Table] = {}
    for core, model, changes in CORES if measured else ():
        case = Case(model, True)
        lengths = activation_rows(case, changes, {f"s {s}, b 1": (s, 1) for s in LENGTHS})
        batches = activation_rows(case, changes, {f"s 256, b {b}": (256, b) for b in BATCHES})
        tables[f"{case.where}, {core}, bf16"] = [*lengths, *batches]
    for core, model, changes in CORES:
        case = Case(model, False)
        long = activation_rows(case, changes, {f"s {s}, b 1": (s, 1) for s in LONG})
        tables[f"{case.heading}, {core}"] = [*long, crossing(case, changes)]
    notes = (
        "The eager core keeps as²b scores a layer; a fused one makes them again, and the rest "
        "grows as sb. Counted is",
        "all that exists after forward for backward. The formula has the logits whole, which our "
        "loss never keeps, and",
        "of a gated MLP one tensor more than ours. The study puts the length from which "
        "activations outgrow the model",
        "states at about 4,000 tokens; it depends on the model, the batch and ZeRO.",
    )
    title = "Activations by sequence length and batch"
    return Reproduction(
        title,
        tables,
        lambda: {"": pictures.by_length("Activations against sequence length", tables)},
        notes,
    )


def activation_rows(
    case: Case, changes: Sequence[str], shapes: Mapping[str, tuple[int, int]]
) -> list[Row]:
    """Return the activations after forward at each (s, b): measured in this process, by dry run
    and by formula.
    """
    runs = {label: case.config(*changes, *case.model.at(*shape)) for label, shape in shapes.items()}
    columns: Columns = {
        "measured": {label: kept_by_model(config) for label, config in runs.items() if case.small},
        "planned": {
            label: left_by_forward(config, cpu=case.small) for label, config in runs.items()
        },
        "formula": {label: kept_by_formula(config) for label, config in runs.items()},
    }
    return rows("MiB", columns, MIB)


def kept_by_model(config: RunConfig) -> int:
    """Return the bytes that a model's forward keeps for backward."""
    model, _ = built(config, Topology(world=1))

    def loss(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens, labels=tokens).loss
        return found

    return sum(one.bytes for one in kept_by_backward(loss, drawn(config)[0].input_ids))


def crossing(case: Case, changes: Sequence[str]) -> Row:
    """Return the sequence length from which activations exceed the model states, by formula."""
    view = view_of(case.config(*changes, *case.model.at(LONG[0], 1)))
    for length in range(256, 2**20, 256):
        sizes = replace(view, workload=replace(view.workload, length=length)).bytes()
        if sizes["activations"] + sizes["outside layers"] > sum(sizes[name] for name in STATES):
            return Row("activations outgrow model states at s", "tokens", formula=length)
    raise AssertionError("no length is long enough")


# ---- by dtype ------------------------------------------------------------------------------------


def by_dtype(*, measured: bool) -> Reproduction:
    """Bytes of model states per parameter after backward, by dtype."""
    tables: dict[str, Table] = {
        case.heading: [row for name in DTYPES for row in dtype_rows(case, name)]
        for case in cases(measured)
        if case.small or case.model is GPT2
    }
    notes = (
        "fp32: 4 + 4 + 8. 16 bits: 2 + 2 + 4 of masters + 8 of moments; 4 more where gradients are "
        "added up in fp32,",
        "which are a buffer of DeepSpeed's.",
    )
    return Reproduction("Model states by dtype, AdamW", tables, notes=notes)


def dtype_rows(case: Case, name: str) -> list[Row]:
    changes, formula = DTYPES[name]
    whole = run_model_size(case.config(*changes)).num_parameters
    columns = {}
    for column, points in case.later(*changes).items():
        sizes = states(points)
        sizes["together"] = sum(sizes.values())
        columns[column] = {f"{name}: {kind}": size / whole for kind, size in sizes.items()}
    columns["formula"] = {f"{name}: together": formula}
    return [row for row in rows("bytes a parameter", columns) if row.planned]


# ---- by recomputation ----------------------------------------------------------------------------


def by_recomputation(*, measured: bool) -> Reproduction:
    """The most activations, and the peak of a later step, by recomputation."""
    tables: dict[str, Table] = {}
    stacks: dict[str, dict[str, Mapping[str, float]]] = {}
    for case in cases(measured):
        by_mode = {mode: case.later(f"zero_tp.recompute={mode}") for mode in RECOMPUTED}
        heading = f"{case.heading}, {case.model.core}"
        drawn = "measured" if case.small else "planned"
        tables[heading] = [
            row for mode, points in by_mode.items() for row in figure_rows(MOST, mode, points)
        ]
        stacks[f"{heading}, {drawn}"] = {
            mode: peak(points[drawn]).bytes for mode, points in by_mode.items()
        }
    notes = (
        "Selective recomputation takes what an eager core keeps; a fused core keeps next to "
        "nothing by itself.",
    )

    def draw() -> dict[str, Any]:
        return {
            str(number): pictures.memory_bars(f"Memory at its peak: {heading}", bars, None)
            for number, (heading, bars) in enumerate(stacks.items(), start=1)
        }

    return Reproduction("Memory by recomputation", tables, draw, notes)
