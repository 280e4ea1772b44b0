"""ZeRO-R (arXiv 1910.02054, sections 3 and 6): split checkpoints P_a, constant buffers C_B,
defragmentation M_D.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence

from benchmarks.papers import formulas as printed
from benchmarks.papers.allocator import Event, least_capacity, replay
from benchmarks.papers.engines import kept_by_formula, large_config, left_by_forward, small_config
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row, Table, rows
from benchmarks.papers.steps import after_forward, events, followed_steps, most_in_backward
from zero_tp.base.constants import MIB
from zero_tp.tools.planning import formulas
from zero_tp.tools.planning.dryrun import fake_micro_batch
from zero_tp.tools.planning.memory import ModelSize, run_model_size
from zero_tp.tools.planning.plan_settings import ZeroSettings, workload_of
from zero_tp.tools.planning.tracking import Allocations
from zero_tp.tools.planning.zero import ZeroMemory

GB = 1e9
# Of 1.5 B parameters, b 32, s 1024 (section 3) [GB].
STATES = 24
FUSED = 6
ACTIVATIONS = 60
SHAPE_1_5B = {"layers": 48, "h": 1600, "v": 50257, "positions": 1024}

FULL = ("zero_tp.recompute=full", "zero_tp.parallel.sequence=false")
CHECKPOINTS = {
    "checkpoints whole": {},
    "P_a": {"partition_activations": True},
    "P_a+cpu": {"partition_activations": True, "cpu_checkpointing": True},
}
M_D = {False: "M_D off", True: "M_D on"}
BUCKETS = {"C_B": 1_000_000, "one buffer for all": 100_000_000}
SIZES = (6, 12)
# Checkpoints of 1.25 MiB on each rank.
FRAGMENTED = (
    *(
        "zero_tp.data.sequence_length=512",
        "train_micro_batch_size_per_gpu=10",
        "zero_tp.model.attn_pdrop=0.0",
    ),
    *("zero_optimization.stage=2", "zero_tp.parallel.tensor=2", *FULL),
)


def residual(*, measured: bool) -> Reproduction:
    """P_a, P_a+cpu, C_B and M_D, each on and off."""
    tables: dict[str, Table] = {}
    if measured:
        config = small_config(2, "zero_tp.parallel.tensor=2", *FULL)
        size = f"{run_model_size(config).num_parameters / 1e6:.1f} M parameters"
        tables[f"activations after forward: {size}, TP 2"] = checkpoints_measured()
        tables["buffers in backward: ZeRO-2 on 2 ranks"] = buffers_measured()
        events_by_switch = {
            on: followed_steps(small_config(4, *with_m_d(on)))[0][1].events for on in M_D
        }
        tables[f"fragmentation: a step of {size}, ZeRO-2, TP 2 × DP 2"] = fragmentation(
            events_by_switch, "measured"
        )
    tables["activations after forward: 7.5 B, TP 8, b 8, s 1,024"] = [
        checkpoints_planned(name, "zero_7.5b", block) for name, block in CHECKPOINTS.items()
    ]
    tables["buffers: ZeRO-2 on 64 devices"] = [
        buffers_planned(name) for name in ("zero_7.5b", "zero_128b", "zero_1t")
    ]
    tables["1.5 B parameters, b 32, s 1,024 (section 3)"] = rows_of_section_3()
    dry = {on: fake_events(on) for on in M_D}
    tables["fragmentation: two micro-batches of 12 layers of 4,096, TP 8"] = fragmentation(
        dry, "planned"
    )
    notes = (
        "Fragmentation: what a step makes and lets go, in its order, given to a model of CUDA's "
        "caching allocator",
        "(benchmarks/papers/allocator.py). M_D: checkpoints in one buffer, gradients in "
        "DeepSpeed's contiguous ones.",
        "P_a+cpu is planned alone: a CPU rank's checkpoints are in host memory already. C_B: two "
        "bytes an element of",
        "reduce_bucket_size; the formula is one fp32 buffer of all gradients. The formula of "
        "activations has all",
        "logits in fp32, where the loss here goes block by block.",
    )
    return Reproduction("ZeRO-R: P_a, C_B, M_D (sections 3 and 6)", tables, notes=notes)


# ---- P_a -----------------------------------------------------------------------------------------


def checkpointing(block: dict[str, bool]) -> str:
    return f"activation_checkpointing={json.dumps(block)}"


def checkpoints_measured() -> list[Row]:
    """Return what forward keeps on TP 2, whole and split."""
    table = []
    for name in ("checkpoints whole", "P_a"):
        config = small_config(
            2, "zero_tp.parallel.tensor=2", *FULL, checkpointing(CHECKPOINTS[name])
        )
        most = max(
            after_forward(second.points)["activations"] for _, second in followed_steps(config)
        )
        planned = left_by_forward(config, cpu=True)
        formula = kept_by_formula(config)
        table.append(Row(name, "MiB", most / MIB, planned / MIB, formula / MIB))
    return table


def checkpoints_planned(name: str, file: str, block: dict[str, bool]) -> Row:
    config = large_config(file, 8, "zero_tp.parallel.tensor=8", *FULL, checkpointing(block))
    return Row(
        name, "GB", None, left_by_forward(config, cpu=False) / GB, kept_by_formula(config) / GB
    )


# ---- C_B -----------------------------------------------------------------------------------------


def buffers_measured() -> list[Row]:
    """Return the buckets of two sizes of models, constant and as large as the model."""
    table = []
    for layers, (name, elements) in itertools.product(SIZES, BUCKETS.items()):
        changes = (f"zero_tp.model.n_layer={layers}", "zero_optimization.stage=2")
        whole = run_model_size(small_config(2, *changes)).num_parameters
        bucket = min(elements, whole)
        config = small_config(2, *changes, f"zero_optimization.reduce_bucket_size={bucket}")
        most = max(
            most_in_backward(second.points)["buffers"] for _, second in followed_steps(config)
        )
        table.append(
            Row(f"{whole / 1e6:.1f} M, {name}", "MB", most / 1e6, formula=2 * bucket / 1e6)
        )
    return table


def buffers_planned(file: str) -> Row:
    config = large_config(file, 64, "zero_optimization.stage=2")
    model: ModelSize = run_model_size(config)
    settings = ZeroSettings.of(config, cpu=False)
    planned = ZeroMemory(model.parameters, settings).in_last_reduction().buffers
    label = f"{model.num_parameters / 1e9:,.1f} B parameters"
    return Row(
        label, "GB", None, planned / GB, printed.fused_buffer_bytes(model.num_parameters) / GB
    )


def rows_of_section_3() -> list[Row]:
    sizes = SHAPE_1_5B
    whole = printed.gpt_parameters(sizes["layers"], sizes["h"], sizes["v"], sizes["positions"])
    states = sum(formulas.model_states(whole, 0, 1).values())
    activations = printed.gpt2_activation_bytes(1024, 32, sizes["h"], sizes["layers"])
    note = "the estimate counts 12 values of h a token and layer, no scores"
    return [
        Row("model states", "GB", formula=states / GB, published=STATES),
        Row(
            "one fp32 buffer of all gradients",
            "GB",
            formula=printed.fused_buffer_bytes(whole) / GB,
            published=FUSED,
        ),
        Row(
            "activations, all kept",
            "GB",
            formula=activations / GB,
            published=ACTIVATIONS,
            note=note,
        ),
    ]


# ---- M_D -----------------------------------------------------------------------------------------


def with_m_d(on: bool) -> tuple[str, ...]:
    """Return the changes of a run with P_a, with or without M_D."""
    return (
        *FRAGMENTED,
        defragmented(on),
        f"zero_optimization.contiguous_gradients={json.dumps(on)}",
    )


def defragmented(on: bool) -> str:
    return checkpointing({**CHECKPOINTS["P_a"], "contiguous_memory_optimization": on})


def fragmentation(events_by_switch: Mapping[bool, Sequence[Event]], column: str) -> list[Row]:
    """Return what the caching allocator makes of what a real step, or a dry run, makes and lets
    go.
    """
    sizes = dict[str, float]()
    notes = dict[str, str]()
    for on, name in M_D.items():
        replayed = replay(events_by_switch[on])
        sizes[f"{name}: most in tensors"] = replayed.tensors
        sizes[f"{name}: most in segments"] = replayed.reserved
        sizes[f"{name}: never filled"] = replayed.reserved - replayed.tensors
        notes[f"{name}: never filled"] = f"{replayed.fragmentation:.1%} of the segments"
        sizes[f"{name}: least memory that runs it"] = least_capacity(events_by_switch[on])
    return rows("MiB", {column: sizes}, MIB, notes)


def fake_events(on: bool) -> list[Event]:
    """Return what two micro-batches of a large model make and let go, with or without M_D, in a dry
    run of all layers.

    Without it gradients come into being between what backward lets go; with it they have a buffer
    from the start.
    """
    few = ("zero_tp.model.n_layer=12", "zero_tp.parallel.tensor=8", *FULL)
    config = large_config("zero_7.5b", 8, *few, defragmented(on))
    workload = workload_of(config, cpu=False)
    with fake_micro_batch(config.hf_config(), workload, all_layers=True) as (model, batch, _):
        parameters = list(model.parameters())
        with Allocations(parameters[0].device.type) as allocations:
            allocations.mark(parameters, "parameters")
            buffer = (
                parameters[0].new_empty(sum(each.numel() for each in parameters)) if on else None
            )
            for parameter in parameters if on else ():
                parameter.register_post_accumulate_grad_hook(
                    lambda each: setattr(each, "grad", None)
                )
            for _ in range(2):
                model(batch.input_ids, **batch.arguments()).loss.backward()
            del buffer
        return events(allocations)
