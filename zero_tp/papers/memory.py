"""Where training memory goes: over the time of a step, by length and batch, by dtype, by recomputation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_tp.activations.memory import ActivationMemory
from zero_tp.config import RunConfig
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.papers import pictures
from zero_tp.papers.engines import drawn, model_in
from zero_tp.papers.kept import kept_by_backward
from zero_tp.papers.reproduction import Reproduction
from zero_tp.papers.rows import Row, Table
from zero_tp.papers.steps import Steps, measured_steps, planned_steps
from zero_tp.papers.studied import CORES, GPT2, MODELS, Model
from zero_tp.planning import pictures as planning
from zero_tp.planning.dryrun import dry_run
from zero_tp.planning.memory import Point
from zero_tp.planning.papers import PaperView
from zero_tp.planning.workload import workload_of
from zero_tp.topology import Topology

MIB = 2**20
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
"""Changes of the config, and the study's bytes a parameter."""


# ---- over time -------------------------------------------------------------------------------------------------------


def over_time(*, measured: bool) -> Reproduction:
    """Memory over the first and later steps, by category."""
    tables: dict[str, Table] = {}
    shown: dict[str, tuple[str, Steps]] = {}
    for key, model in MODELS.items():
        if measured:
            config = model.in_small()
            real, plan = measured_steps(config), planned_steps(config, cpu=True)
            heading = f"a small {model.kind} on one CPU rank, bf16"
            tables[heading] = step_rows(plan, real)
            shown[f"{key}_measured"], shown[f"{key}_planned"] = (
                (f"{heading}, measured", real),
                (f"{heading}, planned", plan),
            )
        full = planned_steps(model.at_full_size(), cpu=False)
        tables[model.on] = step_rows(full)
        shown[key] = f"{model.on}, planned", full
    notes = (
        "The optimizer makes its moments in the first update: until then a new run has its masters alone. A later",
        "update peaks before, where gradients are there as they were made, flat and in fp32 beside the moments.",
    )

    def draw() -> dict[str, Any]:
        return {
            name: planning.over_time(title, steps, None, "the first and a later step")
            for name, (title, steps) in shown.items()
        }

    return Reproduction("Memory over time, by category", tables, draw, notes)


def step_rows(planned: Steps, measured: Steps | None = None) -> list[Row]:
    """Return what each step has at some of its moments."""
    real = list((measured or {}).values())
    return [
        Row(f"{name}: {label}", "MiB", moment(real[number]) / MIB if real else None, moment(plan) / MIB)
        for number, (name, plan) in enumerate(planned.items())
        for label, moment in MOMENTS.items()
    ]


def states(found: Sequence[Point]) -> dict[str, float]:
    """Return what there is after backward: model states and buffers."""
    last = before_update(found)[-1].bytes
    return {name: last[name] for name in (*STATES, "buffers")}


def before_update(found: Sequence[Point]) -> list[Point]:
    return [point for point in found if point.phase != "step"]


def most_activations(found: Sequence[Point]) -> float:
    return max(point.bytes["activations"] for point in found)


def peak(found: Sequence[Point]) -> Point:
    return max(found, key=lambda point: point.total)


MOMENTS: dict[str, Callable[[Sequence[Point]], float]] = {
    "parameters": lambda found: found[0].bytes["parameters"],
    "optimizer states before the update": lambda found: found[0].bytes["optimizer"],
    "optimizer states after it": lambda found: found[-1].bytes["optimizer"],
    "gradients after backward": lambda found: states(found)["gradients"],
    "activations at their most": most_activations,
    "peak of forward and backward": lambda found: peak(before_update(found)).total,
    "peak of the update": lambda found: peak([point for point in found if point.phase == "step"]).total,
}


# ---- by length and batch ---------------------------------------------------------------------------------------------

LENGTHS, BATCHES = (128, 256, 512, 1024), (1, 2, 4, 8)
LONG = (1024, 2048, 4096, 6144, 8192)


def by_length(*, measured: bool) -> Reproduction:
    """Activations that the forward of a whole model leaves, against sequence length and batch."""
    tables: dict[str, Table] = {}
    for core, model, changes in CORES if measured else ():
        lengths = [activation_row(model.in_small(*changes, *model.at(s, 1)), True, f"s {s}, b 1") for s in LENGTHS]
        batches = [activation_row(model.in_small(*changes, *model.at(256, b)), True, f"s 256, b {b}") for b in BATCHES]
        tables[f"a small {model.kind}, {core}, bf16"] = [*lengths, *batches]
    for core, model, changes in CORES:
        rows = [activation_row(model.at_full_size(*changes, *model.at(s, 1)), False, f"s {s}, b 1") for s in LONG]
        tables[f"{model.on}, {core}"] = [*rows, crossing(model, changes)]
    notes = (
        "The eager core keeps as²b scores a layer; a fused one makes them again, and the rest grows as sb. Counted is",
        "all that exists after forward for backward. The formula has the logits whole, which our loss never keeps, and",
        "of a gated MLP one tensor more than ours. The study puts the length from which activations outgrow the model",
        "states at about 4,000 tokens; it depends on the model, the batch and ZeRO.",
    )

    def draw() -> dict[str, Any]:
        return {"": pictures.by_length("Activations against sequence length", tables)}

    return Reproduction("Activations by sequence length and batch", tables, draw, notes)


def activation_row(config: RunConfig, measured: bool, label: str) -> Row:
    """Return what forward leaves: measured in this process, by a dry run, and by formula."""
    workload = workload_of(config, cpu=measured)
    forward = [one for one in dry_run(config.hf_config(), workload) if one.phase == "forward"]
    return Row(
        label,
        "MiB",
        left_by_forward(config) / MIB if measured else None,
        forward[-1].activations / MIB,
        by_formula(config) / MIB,
    )


def by_formula(config: RunConfig) -> float:
    view = view_of(config)
    return view.layers_bytes() + view.outside_bytes()


def view_of(config: RunConfig) -> PaperView:
    return PaperView(model_in(config), workload_of(config, cpu=False), config.zero_stage, config.data_parallel)


def left_by_forward(config: RunConfig) -> int:
    """Return the bytes of all storages that a model's forward leaves for its backward."""
    model = ZeroTPForCausalLM(config.hf_config(), Topology(world=1), dtype=torch.bfloat16).train()
    ActivationMemory(model, config.zero_tp.recompute_policy, {}, torch.device("cpu"))

    def loss(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens, labels=tokens).loss
        return found

    return sum(one.bytes for one in kept_by_backward(loss, drawn(config)[0].input_ids))


def crossing(model: Model, changes: Sequence[str]) -> Row:
    """Return from how many tokens on activations of one sequence outgrow the model states, by formula."""
    view = view_of(model.at_full_size(*changes, *model.at(LONG[0], 1)))
    for length in range(256, 2**20, 256):
        longer = replace(view, workload=replace(view.workload, length=length))
        sizes = longer.bytes()
        if sizes["activations"] + sizes["outside layers"] > sum(sizes[name] for name in STATES):
            return Row("activations outgrow model states at s", "tokens", formula=length)
    raise AssertionError("no length is long enough")


# ---- by dtype --------------------------------------------------------------------------------------------------------


def by_dtype(*, measured: bool) -> Reproduction:
    """Bytes of model states a parameter, after backward, in each dtype."""
    tables: dict[str, list[Row]] = {}
    for model in MODELS.values() if measured else ():
        rows = tables[f"a small {model.kind} on one CPU rank"] = []
        for name, (changes, formula) in DTYPES.items():
            config = model.in_small(*changes)
            real, plan = measured_steps(config)["second step"], planned_steps(config, cpu=True)["later steps"]
            rows += dtype_rows(name, formula, view_of(config).model.whole, plan, real)
    whole = view_of(GPT2.at_full_size()).model.whole
    tables[GPT2.on] = [
        row
        for name, (changes, formula) in DTYPES.items()
        for row in dtype_rows(
            name, formula, whole, planned_steps(GPT2.at_full_size(*changes), cpu=False)["later steps"]
        )
    ]
    notes = (
        "fp32: 4 + 4 + 8. 16 bits: 2 + 2 + 4 of masters + 8 of moments; 4 more where gradients are added up in fp32,",
        "which are a buffer of DeepSpeed's.",
    )
    return Reproduction("Model states by dtype, AdamW", tables, notes=notes)


def dtype_rows(
    name: str, formula: float, whole: int, planned: Sequence[Point], measured: Sequence[Point] | None = None
) -> list[Row]:
    real, plan = states(measured) if measured else {}, states(planned)
    unit = "bytes a parameter"
    parts = [
        Row(f"{name}: {kind}", unit, real[kind] / whole if real else None, plan[kind] / whole)
        for kind in plan
        if plan[kind]
    ]
    total = sum(real.values()) / whole if real else None
    return [*parts, Row(f"{name}: together", unit, total, sum(plan.values()) / whole, formula)]


# ---- by recomputation ------------------------------------------------------------------------------------------------


def by_recomputation(*, measured: bool) -> Reproduction:
    """Activations at their most and the peak of a later step, by what is recomputed."""
    tables: dict[str, Table] = {}
    stacks: dict[str, dict[str, Mapping[str, float]]] = {}
    for model in MODELS.values():
        if measured:
            heading = f"a small {model.kind} on one CPU rank, {model.core}"
            configs = {mode: model.in_small(f"zero_tp.recompute={mode}") for mode in RECOMPUTED}
            real = {mode: measured_steps(config)["second step"] for mode, config in configs.items()}
            plans = {mode: planned_steps(config, cpu=True)["later steps"] for mode, config in configs.items()}
            tables[heading] = [row for mode in RECOMPUTED for row in recomputed_rows(mode, plans[mode], real[mode])]
            stacks[f"{heading}, measured"] = {mode: peak(found).bytes for mode, found in real.items()}
        full = {
            mode: planned_steps(model.at_full_size(f"zero_tp.recompute={mode}"), cpu=False)["later steps"]
            for mode in RECOMPUTED
        }
        heading = f"{model.on}, {model.core}"
        tables[heading] = [row for mode in RECOMPUTED for row in recomputed_rows(mode, full[mode])]
        stacks[f"{heading}, planned"] = {mode: peak(found).bytes for mode, found in full.items()}
    notes = ("Selective recomputation takes what an eager core keeps; a fused core keeps next to nothing by itself.",)

    def draw() -> dict[str, Any]:
        return {
            str(number): planning.bars(f"Memory at its peak: {heading}", bars, None)
            for number, (heading, bars) in enumerate(stacks.items(), start=1)
        }

    return Reproduction("Memory by recomputation", tables, draw, notes)


def recomputed_rows(mode: str, planned: Sequence[Point], measured: Sequence[Point] | None = None) -> list[Row]:
    figures = {"activations at their most": most_activations, "peak": lambda found: peak(found).total}
    return [
        Row(f"{mode}: {label}", "MiB", figure(measured) / MIB if measured else None, figure(planned) / MIB)
        for label, figure in figures.items()
    ]
