"""ZeRO-R (arXiv 1910.02054, sections 3 and 6): split checkpoints P_a, constant buffers C_B, defragmentation M_D."""

from __future__ import annotations

import json
from collections.abc import Iterable

from zero_tp.config import RunConfig
from zero_tp.papers import formulas as printed
from zero_tp.papers import zero_steps
from zero_tp.papers.allocator import Event, least_capacity, replay
from zero_tp.papers.engines import large_config, model_in, small_config
from zero_tp.papers.ranks import on_ranks
from zero_tp.papers.reproduction import Reproduction
from zero_tp.papers.rows import Row, Table
from zero_tp.planning import formulas
from zero_tp.planning.dryrun import dry_run, without_numbers
from zero_tp.planning.memory import Model, zero_memory
from zero_tp.planning.papers import PaperView
from zero_tp.planning.tracking import Allocations
from zero_tp.planning.workload import workload_of
from zero_tp.planning.zero_settings import ZeroSettings

MIB, GB = 2**20, 1e9
# Of 1.5 B parameters, b 32, s 1024 (section 3) [GB].
STATES, FUSED, ACTIVATIONS = 24, 6, 60
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
    *("zero_tp.data.sequence_length=512", "train_micro_batch_size_per_gpu=10", "zero_tp.model.attn_pdrop=0.0"),
    *("zero_optimization.stage=2", "zero_tp.parallel.tensor=2", *FULL),
)


def residual(*, measured: bool) -> Reproduction:
    """P_a, P_a+cpu, C_B and M_D, each on and off."""
    tables: dict[str, Table] = {}
    if measured:
        config = small_config(2, "zero_tp.parallel.tensor=2", *FULL)
        size = f"{model_in(config).whole / 1e6:.1f} M parameters"
        tables[f"activations after forward: {size}, TP 2"] = checkpoints_measured()
        tables["buffers in backward: ZeRO-2 on 2 ranks"] = buffers_measured()
        found = {on: on_ranks(zero_steps.bytes_of_a_step, 4, *with_m_d(on))[0][1] for on in M_D}
        tables[f"fragmentation: a step of {size}, ZeRO-2, TP 2 × DP 2"] = [
            row for on in M_D for row in fragmentation(M_D[on], measured=found[on])
        ]
    tables["activations after forward: 7.5 B, TP 8, b 8, s 1,024"] = [
        checkpoints_planned(name, "zero_7.5b", block) for name, block in CHECKPOINTS.items()
    ]
    tables["buffers: ZeRO-2 on 64 devices"] = [buffers_planned(name) for name in ("zero_7.5b", "zero_128b", "zero_1t")]
    tables["1.5 B parameters, b 32, s 1,024 (section 3)"] = rows_of_section_3()
    tables["fragmentation: two micro-batches of 12 layers of 4,096, TP 8"] = [
        row for on in M_D for row in fragmentation(M_D[on], planned=events_without_numbers(on))
    ]
    notes = (
        "Fragmentation: what a step makes and lets go, in its order, given to a model of CUDA's caching allocator",
        "(zero_tp/papers/allocator.py). M_D: checkpoints in one buffer, gradients in DeepSpeed's contiguous ones.",
        "P_a+cpu is planned alone: a CPU rank's checkpoints are in host memory already. C_B: two bytes an element of",
        "reduce_bucket_size; the formula is one fp32 buffer of all gradients. The formula of activations has all",
        "logits in fp32, where the loss here goes block by block.",
    )
    return Reproduction("ZeRO-R: P_a, C_B, M_D (sections 3 and 6)", tables, notes=notes)


# ---- P_a -------------------------------------------------------------------------------------------------------------


def checkpointing(block: dict[str, bool]) -> str:
    return f"activation_checkpointing={json.dumps(block)}"


def checkpoints_measured() -> list[Row]:
    """Return what forward keeps on TP 2, whole and split."""
    rows = []
    for name in ("checkpoints whole", "P_a"):
        changes = ("zero_tp.parallel.tensor=2", *FULL, checkpointing(CHECKPOINTS[name]))
        found = on_ranks(zero_steps.bytes_of_a_step, 2, *changes)
        most = max(each["forward"]["activations"] for each, _ in found)
        config = small_config(2, *changes)
        rows.append(Row(name, "MiB", most / MIB, kept(config, cpu=True) / MIB, by_formula(config, cpu=True) / MIB))
    return rows


def checkpoints_planned(name: str, file: str, block: dict[str, bool]) -> Row:
    config = large_config(file, 8, "zero_tp.parallel.tensor=8", *FULL, checkpointing(block))
    return Row(name, "GB", None, kept(config, cpu=False) / GB, by_formula(config, cpu=False) / GB)


def kept(config: RunConfig, *, cpu: bool) -> float:
    """Return the bytes of a dry run's activations on the device as forward ends."""
    moments = dry_run(config.hf_config(), workload_of(config, cpu=cpu))
    return [moment.activations for moment in moments if moment.phase == "forward"][-1]


def by_formula(config: RunConfig, *, cpu: bool) -> float:
    view = PaperView(model_in(config), workload_of(config, cpu=cpu), config.zero_stage, config.data_parallel)
    return view.layers_bytes() + view.outside_bytes()


# ---- C_B -------------------------------------------------------------------------------------------------------------


def buffers_measured() -> list[Row]:
    """Return the buckets of two sizes of models, constant and as large as the model."""
    rows = []
    for layers in SIZES:
        for name, elements in BUCKETS.items():
            whole = model_in(small_config(2, f"zero_tp.model.n_layer={layers}")).whole
            bucket = min(elements, whole)
            changes = (f"zero_tp.model.n_layer={layers}", f"zero_optimization.reduce_bucket_size={bucket}")
            found = on_ranks(zero_steps.bytes_of_a_step, 2, "zero_optimization.stage=2", *changes)
            most = max(each["backward"]["buffers"] for each, _ in found)
            rows.append(Row(f"{whole / 1e6:.1f} M, {name}", "MB", most / 1e6, formula=2 * bucket / 1e6))
    return rows


def buffers_planned(file: str) -> Row:
    config = large_config(file, 64, "zero_optimization.stage=2")
    model: Model = model_in(config)
    settings = ZeroSettings.of(config.deepspeed_config(), config.data_parallel, cpu=False)
    planned = zero_memory(model.parameters, settings).end_of_backward().buffers
    label = f"{model.whole / 1e9:,.1f} B parameters"
    return Row(label, "GB", None, planned / GB, printed.fused_buffer_bytes(model.whole) / GB)


def rows_of_section_3() -> list[Row]:
    sizes = SHAPE_1_5B
    whole = printed.gpt_parameters(sizes["layers"], sizes["h"], sizes["v"], sizes["positions"])
    states = sum(formulas.model_states(whole, 0, 1).values())
    activations = printed.gpt2_activation_bytes(1024, 32, sizes["h"], sizes["layers"])
    note = "the estimate counts 12 values of h a token and layer, no scores"
    return [
        Row("model states", "GB", formula=states / GB, published=STATES),
        Row("one fp32 buffer of all gradients", "GB", formula=printed.fused_buffer_bytes(whole) / GB, published=FUSED),
        Row("activations, all kept", "GB", formula=activations / GB, published=ACTIVATIONS, note=note),
    ]


# ---- M_D -------------------------------------------------------------------------------------------------------------


def with_m_d(on: bool) -> tuple[str, ...]:
    """Return the changes of a run with P_a, with or without M_D."""
    block = {**CHECKPOINTS["P_a"], "contiguous_memory_optimization": on}
    return (*FRAGMENTED, checkpointing(block), f"zero_optimization.contiguous_gradients={json.dumps(on)}")


def fragmentation(
    name: str, measured: Iterable[Event] | None = None, planned: Iterable[Event] | None = None
) -> list[Row]:
    """Return what the caching allocator makes of what a real step, or a dry run, makes and lets go."""
    events = list(measured or planned or ())
    found, least = replay(events), least_capacity(events)

    def row(what: str, size: int, note: str = "") -> Row:
        mebibytes = size / MIB
        if measured is None:
            return Row(f"{name}: {what}", "MiB", planned=mebibytes, note=note)
        return Row(f"{name}: {what}", "MiB", measured=mebibytes, note=note)

    return [
        row("most in tensors", found.tensors),
        row("most in segments", found.reserved),
        row("never filled", found.reserved - found.tensors, f"{found.fragmentation:.1%} of the segments"),
        row("least memory that runs it", least),
    ]


def events_without_numbers(on: bool) -> list[Event]:
    """Return what two micro-batches of a large model make and let go, with or without M_D, in a dry run of all layers.

    Without it gradients come into being between what backward lets go; with it they have a buffer from the start.
    """
    block = {**CHECKPOINTS["P_a"], "contiguous_memory_optimization": on}
    few = ("zero_tp.model.n_layer=12", "zero_tp.parallel.tensor=8", *FULL)
    config = large_config("zero_7.5b", 8, *few, checkpointing(block))
    workload = workload_of(config, cpu=False)
    with without_numbers(config.hf_config(), workload, whole=True) as (model, batch, _):
        parameters = list(model.parameters())
        with Allocations(parameters[0].device.type) as allocations:
            allocations.mark(parameters, "parameters")
            buffer = parameters[0].new_empty(sum(each.numel() for each in parameters)) if on else None
            for parameter in parameters if on else ():
                parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
            for _ in range(2):
                model(batch.input_ids, **batch.arguments()).loss.backward()
            del buffer
        return zero_steps.events(allocations)
