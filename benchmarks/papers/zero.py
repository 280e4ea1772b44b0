"""Results of ZeRO (arXiv 1910.02054): model states by stage, the largest model that fits, and
communication.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.multiprocessing.spawn import ProcessException

from benchmarks.papers import zero_steps
from benchmarks.papers.engines import large_config, small_config
from benchmarks.papers.pictures import stacked
from benchmarks.papers.ranks import on_ranks
from benchmarks.papers.reproduction import Reproduction
from benchmarks.papers.rows import Row, Table
from benchmarks.papers.steps import followed_steps, most_in_backward
from benchmarks.papers.zero_residual import residual
from zero_tp.base.constants import GIB, MIB
from zero_tp.parallel.devices import Device, named_device
from zero_tp.run.config import RunConfig
from zero_tp.tools.planning import formulas
from zero_tp.tools.planning.dryrun import dry_run
from zero_tp.tools.planning.memory import ModelSize, RankMemory, rank_memory, run_model_size
from zero_tp.tools.planning.plan import Estimate
from zero_tp.tools.planning.plan_settings import ZeroSettings, workload_of
from zero_tp.tools.planning.zero import ZeroMemory

__all__ = ["largest_model", "model_states", "residual", "volume"]

STAGES = {0: "ZeRO-0", 1: "ZeRO-1 (P_os)", 2: "ZeRO-2 (P_os+g)", 3: "ZeRO-3 (P_os+g+p)"}
STATES = ("parameters", "gradients", "optimizer")
FIGURE_1 = {64: {0: 120, 1: 31.4, 2: 16.6, 3: 1.88}}
"""N_d → stage → GB of a device with 7.5 B parameters."""
TABLE_1 = {
    1: {1: 2048, 2: 2048, 3: 2048},
    4: {1: 896, 2: 704, 3: 512},
    16: {1: 608, 2: 368, 3: 128},
    64: {1: 536, 2: 284, 3: 32},
    256: {1: 518, 2: 263, 3: 8},
    1024: {1: 513, 2: 257, 3: 2},
}
"""The same for 128 B parameters, truncated."""
VOLUME = {0: 2, 1: 2, 2: 2, 3: 3}
"""Stage → elements that a rank sends a step, in Ψ (section 7)."""
Stacks = dict[str, Mapping[str, float]]
"""Label → category → size."""
RANKS = (1, 2, 4)
BUDGET = 512 * MIB
"""Memory of a rank that is filled with layers [bytes]."""
WITHIN = (
    *("zero_tp.data.sequence_length=16", "train_micro_batch_size_per_gpu=1"),
    *("zero_tp.model.vocab_size=256", "zero_tp.model.n_embd=512"),
)


def at_stage(stage: int) -> str:
    return f"zero_optimization.stage={stage}"


# ---- table 1 and figure 1: model states by stage and N_d -----------------------------------------


def model_states(*, measured: bool) -> Reproduction:
    """Bytes of parameters, gradients and optimizer states, by stage and N_d."""
    tables: dict[str, Table] = {}
    pictures: dict[str, tuple[str, Stacks]] = {}
    for ranks in RANKS if measured else ():
        whole = run_model_size(small_config(ranks)).num_parameters
        heading = f"{whole / 1e6:.1f} M parameters on {ranks} rank{'s' * (ranks > 1)}"
        tables[heading], stacks = states_on(ranks)
        pictures[f"{heading}, measured"] = "MB", stacks
    figure_1 = "7.5 B parameters on 64 devices (figure 1)"
    tables[figure_1], stacks = states_of("zero_7.5b", FIGURE_1)
    pictures[f"{figure_1}, planned"] = "GB", stacks
    tables["128 B parameters (table 1)"], _ = states_of("zero_128b", TABLE_1)
    unpublished = {data: dict.fromkeys(row) for data, row in TABLE_1.items()}
    tables["1 T parameters (table 1)"], _ = states_of("zero_1t", unpublished)
    notes = (
        "Planned: what DeepSpeed allocates when backward ends. Gradients: under ZeRO-1 this rank's "
        "partition beside",
        "all of them; it and ZeRO-2's hold whole parameters wherever a partition reaches into one. "
        "The published",
        "figures of 128 B are cut off, and our model has 0.4 % fewer parameters.",
    )
    return Reproduction(
        "Model states by stage (table 1, figure 1)", tables, lambda: stacked(pictures), notes
    )


def states_on(ranks: int) -> tuple[list[Row], Stacks]:
    """Return the rows of a small model, each the most of any rank, and the stacks of a picture."""
    rows = list[Row]()
    stacks = Stacks()
    for stage, name in STAGES.items():
        config = small_config(ranks, at_stage(stage))
        peaks = [most_in_backward(second.points) for _, second in followed_steps(config)]
        planned, formula = states(config, run_model_size(config))
        most = {kind: max(one[kind] for one in peaks) / 1e6 for kind in STATES}
        for kind in STATES:
            least = min(one[kind] for one in peaks) / 1e6
            note = f"the least of a rank {least:.4g}" if least < 0.995 * most[kind] else ""
            rows.append(
                Row(
                    f"{name}, {kind}",
                    "MB",
                    most[kind],
                    planned[kind] / 1e6,
                    formula[kind] / 1e6,
                    note=note,
                )
            )
        stacks[name] = most
    return rows, stacks


def states_of(
    name: str, published: Mapping[int, Mapping[int, float | None]]
) -> tuple[list[Row], Stacks]:
    """Return the rows of a paper's config by N_d and stage, and the stacks of a picture."""
    rows = list[Row]()
    stacks = Stacks()
    model = run_model_size(large_config(name, 1))
    for data, stages in published.items():
        for stage, gigabytes in stages.items():
            planned, formula = states(large_config(name, data, at_stage(stage)), model)
            label = STAGES[stage] if len(published) == 1 else f"N_d {data}, ZeRO-{stage}"
            rows.append(
                Row(
                    label,
                    "GB",
                    None,
                    sum(planned.values()) / 1e9,
                    sum(formula.values()) / 1e9,
                    gigabytes,
                )
            )
            stacks[label] = {kind: size / 1e9 for kind, size in planned.items()}
    return rows, stacks


def states(config: RunConfig, model: ModelSize) -> tuple[dict[str, float], dict[str, float]]:
    """Return one rank's bytes of model states: DeepSpeed's at the end of backward, and the
    paper's.
    """
    settings = ZeroSettings.of(config, cpu=True)
    at_end = ZeroMemory(model.parameters, settings).in_last_reduction()
    planned = {
        "parameters": at_end.parameters,
        "gradients": at_end.gradients,
        "optimizer": at_end.optimizer,
    }
    return planned, formulas.model_states(
        model.num_parameters, config.zero_stage, config.data_parallel
    )


# ---- the largest model that fits -----------------------------------------------------------------


def largest_model(*, measured: bool) -> Reproduction:
    """The most layers that train in a given memory, by stage."""
    ranks = RANKS[-1]
    tables: dict[str, Table] = {}
    if measured:
        rows = []
        for stage, name in STAGES.items():
            planned = most_planned(ranks, stage)
            most = most_built(ranks, stage, planned)
            built, states = (
                run_model_size(with_layers(ranks, layers)).num_parameters
                for layers in (most, planned)
            )
            share = sum(formulas.model_states(1.0, stage, ranks).values())
            rows.append(
                Row(
                    name,
                    "M parameters",
                    built / 1e6,
                    states / 1e6,
                    BUDGET / share / 1e6,
                    note=f"{most} layers",
                )
            )
        tables[f"{BUDGET // MIB} MiB on each of {ranks} ranks"] = rows
    device = named_device("a100-80gb")
    for devices in (64, 1024):
        shares = {
            stage: sum(formulas.model_states(1.0, stage, devices).values()) for stage in STAGES
        }
        tables[f"{device.name} × {devices}, layers of 4,096"] = [
            Row(
                STAGES[stage],
                "B parameters",
                None,
                planned / 1e9,
                device.memory_gib * GIB / shares[stage] / 1e9,
            )
            for stage, planned in most_on(device, devices).items()
        ]
    notes = (
        "Measured: ranks train two steps in that many bytes of address space (RLIMIT_AS) more than "
        "a model of one",
        "layer took; with one layer more the system refuses. That counts Python's and DeepSpeed's "
        "objects too, most",
        "under ZeRO-3; the plan counts tensors, activations and buffers too; the formula has model "
        "states alone.",
    )
    return Reproduction("The largest model that fits, by stage", tables, notes=notes)


def with_layers(ranks: int, layers: int, *changes: str) -> RunConfig:
    """Return a small run with this number of layers."""
    return small_config(ranks, *WITHIN, layers_of(layers), *changes)


def layers_of(layers: int) -> str:
    return f"zero_tp.model.n_layer={layers}"


def most_planned(ranks: int, stage: int) -> int:
    """Return the most layers whose planned peak fits the budget."""

    def fits(layers: int) -> bool:
        config = with_layers(ranks, layers, at_stage(stage))
        peak = rank_memory(config, workload_of(config, cpu=True)).peak
        return peak.total + peak.host <= BUDGET

    return last(fits, 1)


def most_on(device: Device, devices: int) -> dict[int, float]:
    """Return the most parameters by stage, extrapolated linearly from the plans of two numbers
    of layers.

    They are so many that each one more adds to the peak: with 16, buffers of constant size and the
    loss are still most of it under ZeRO-3.
    """
    lines: dict[int, list[tuple[float, int]]] = {stage: [] for stage in STAGES}
    for layers in (64, 128):
        config = large_config(
            "zero_7.5b", devices, "train_micro_batch_size_per_gpu=1", layers_of(layers)
        )
        model = run_model_size(config)
        workload = workload_of(config, cpu=False)
        moments = dry_run(config.hf_config(), workload)
        run_settings = ZeroSettings.of(config, cpu=False)
        for stage, line in lines.items():
            zero = ZeroMemory(
                model.parameters,
                run_settings.with_stage(stage),
                workload.fully_recomputed_layers(model.spec.layers),
            )
            memory = RankMemory(zero, moments)
            line.append((Estimate(device, model, workload, memory).needed, model.num_parameters))
    return {
        stage: parameters
        + (device.memory_gib * GIB - bytes_) * (more - parameters) / (more_bytes - bytes_)
        for stage, ((bytes_, parameters), (more_bytes, more)) in lines.items()
    }


def most_built(ranks: int, stage: int, guess: int) -> int:
    """Return the most layers that ranks train in the budget, measured."""
    least = with_layers(ranks, 1, at_stage(stage))

    def fits(layers: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            full = Path(folder, "full")
            config = with_layers(ranks, layers, at_stage(stage))
            try:
                on_ranks(
                    zero_steps.train_within, ranks, BUDGET, str(full), least, config, seconds=300
                )
            except ProcessException:  # raised, or aborted because threads could not end
                if not full.exists():
                    raise
                return False
            return True

    return last(fits, guess)


def last(fits: Callable[[int], bool], guess: int) -> int:
    """Return the largest number that fits, by a search from `guess` on; all smaller ones fit
    too.
    """
    at = max(1, guess)
    step = 1
    up = fits(at)
    while (further := at + step if up else at - step) > 0 and fits(further) == up:
        at = further
        step = 2 * step
    low, high = (at, further) if up else (max(0, further), at)
    return low + bisect.bisect_left(range(low + 1, high), True, key=lambda number: not fits(number))


# ---- what is sent --------------------------------------------------------------------------------


def volume(*, measured: bool) -> Reproduction:
    """Elements that a rank sends in a step, by stage."""
    tables: dict[str, list[Row]] = {}
    owner = "zero_optimization.use_multi_rank_bucket_allreduce=false"
    sending = {name: [at_stage(stage)] for stage, name in STAGES.items()}
    sending |= {f"{STAGES[stage]}, reduced to owners": [at_stage(stage), owner] for stage in (1, 2)}
    for ranks in RANKS[1:] if measured else ():
        whole = run_model_size(small_config(ranks)).num_parameters
        table = tables[f"{whole / 1e6:.1f} M parameters on {ranks} ranks"] = list[Row]()
        unit = whole * (ranks - 1) / ranks
        for label, changes in sending.items():
            config = small_config(ranks, *changes)
            sent = on_ranks(zero_steps.elements_sent, ranks, config)
            stage = config.zero_stage
            most = max(sum(one.values()) for one in sent)
            formula = formulas.zero_volume(whole, stage, ranks)
            kinds = ", ".join(
                f"{name} {each / unit:.2f}" for name, each in sent[0].items() if each > 0.01 * unit
            )
            table.append(
                Row(label, "Ψ(N-1)/N", most / unit, None, formula / unit, VOLUME[stage], kinds)
            )
    config = large_config("zero_7.5b", 64)
    whole = run_model_size(config).num_parameters
    tables["7.5 B parameters on 64 devices"] = [
        Row(name, "GB", formula=2 * formulas.zero_volume(whole, stage, 64) / 1e9)
        for stage, name in STAGES.items()
    ]
    notes = (
        "Counted from the collectives that ran: an all-reduce of n elements sends 2n(N-1)/N, "
        "others n(N-1)/N.",
        "DeepSpeed's ZeRO-1 and -2 all-reduce each bucket, where the paper reduces each part to "
        "its owner: 3Ψ, as",
        "ZeRO-3. With use_multi_rank_bucket_allreduce false they reduce to owners, and ZeRO-3 "
        "sends 1.5 times as much.",
    )
    return Reproduction("What a rank sends in a step, by stage (section 7)", tables, notes=notes)
