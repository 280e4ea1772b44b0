"""Describe a plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from zero_tp.base.constants import GIB, MIB, in_gib
from zero_tp.model.architectures.spec import ExpertsSpec
from zero_tp.parallel.topology import describe_grid
from zero_tp.tools.planning.matrix_update import MatrixUpdate
from zero_tp.tools.planning.memory import CATEGORIES, Point
from zero_tp.tools.planning.plan import DAY, HOUR, Estimate, Plan
from zero_tp.tools.planning.search import Search

TITLES = {
    "parameters": "parameters",
    "gathered": "gathered by ZeRO-3",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "buffers": "buckets, temporaries",
    "activations": "activations",
    "transients": "transients",
}
GUARD_NOTE = (
    "guard_gradients is not counted: in guarded steps a micro-batch keeps all its activations and "
    "gradients"
)
PHASES = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "the end of backward",
    "step": "the optimizer's step",
}


def describe(plan: Plan) -> str:
    """Return the whole plan as text."""
    return "\n".join([*heading_lines(plan), "", *memory_lines(plan), "", *time_lines(plan)])


def heading_lines(plan: Plan) -> list[str]:
    config = plan.config
    block = plan.config.zero_tp
    model = config.hf_config()
    parameters = plan.model.num_parameters
    workload = plan.workload
    degrees = workload.tensor, config.data_parallel
    grid = describe_grid(*degrees, workload.sequence, workload.expert)
    active = ""
    experts = plan.model.spec.experts
    if experts is not None:
        active = (
            f" ({plan.model.active_parameters:,} active: {experts.per_token} of {experts.count} "
            "experts)"
        )
    return [
        f"{model.model_type}, {parameters:,} parameters{active}, {plan.model.parameters.total:,} a "
        f"{'TP ' * (workload.expert == 1)}rank",
        *([] if experts is None else expert_lines(plan, experts)),
        f"{plan.ranks} × {plan.device.name} = {grid}, ZeRO-{config.zero_stage}, "
        f"{config.dtype}, "
        f"{plan.workload.describe_recompute()}, {block.attention}",
        f"{config.global_batch} × {block.data.sequence_length} tokens a step = micro "
        f"{config.micro_batch} × "
        f"accumulation {config.accumulation} × data {config.data_parallel}",
        *([f"stage {plan.stage}, which needs the most memory"] if plan.stage else []),
        *(["NVMe is counted as host memory"] if config.nvme_paths else []),
        *([GUARD_NOTE] if block.training.guard_gradients else []),
    ]


def expert_lines(plan: Plan, experts: ExpertsSpec) -> list[str]:
    """Say where the tokens of a layer with experts are assumed to go."""
    workload = plan.workload
    assumed = "every expert of a layer gets as many tokens as any other"
    if workload.imbalance > 1:
        assumed = f"the busiest expert rank gets {workload.imbalance:g} times the mean tokens"
    of_rank = experts.count // workload.expert
    rows = workload.expert_rows(plan.model.spec)
    return [
        f"assumed: {assumed}",
        f"EP {workload.expert}: a rank has {of_rank:,} of {experts.count:,} experts of a layer, "
        f"which get {rows:,.0f} rows of tokens in a micro-batch, {rows / of_rank:,.0f} each",
    ]


def memory_lines(plan: Plan) -> list[str]:
    paper = plan.paper.bytes()
    peak = plan.peak
    device = plan.device
    # The allocated column has no such row: the dry run does not tell them apart.
    paper["activations"] += paper.pop("outside layers")
    name, unit = ("GiB", GIB) if sum(paper.values()) >= GIB else ("MiB", MIB)
    lines = [f"{f'memory of one device [{name}]':28}{'by papers':>10}{'allocated':>12}"]
    for category in CATEGORIES:
        if peak.bytes[category] or paper.get(category):
            counted = f"{paper[category] / unit:10.2f}" if category in paper else " " * 10
            lines.append(f"  {TITLES[category]:26}{counted}{peak.bytes[category] / unit:12.2f}")
    if device.is_cpu and peak.host:
        lines.append(f"  {'offloaded':26}{'':10}{peak.host / unit:12.2f}")
    lines.append(
        f"  {'total':26}{sum(paper.values()) / unit:10.2f}{plan.tensor_bytes / unit:12.2f}"
    )
    hint = "" if plan.fits else " (--search tries other settings)"
    plural = "" if plan.communicators == 1 else "s"
    lines.append(
        f"  the peak is in {PHASES[peak.phase]}: {in_gib(plan.tensor_bytes)} GiB of tensors + "
        f"{plan.reserved / GIB:.2f} for the context and {plan.communicators} communicator{plural} "
        "+ "
        f"{in_gib(plan.tensor_bytes * device.fragmentation)} for fragmentation = "
        f"{plan.needed / GIB:.2f} of "
        f"{device.memory_gib:.4g} GiB: {verdict(plan)}{hint}"
    )
    if plan.host_needed:
        lines.append(
            f"  host memory: {in_gib(plan.memory.host)} GiB a rank, {in_gib(plan.host_needed)} of "
            f"{device.host_memory_gib:.4g} for the node's {min(device.per_node, plan.ranks)} ranks"
        )
    return lines


def verdict(plan: Plan) -> str:
    """Return whether the run fits, and which category is the largest if it does not."""
    if plan.fits:
        return f"fits, {plan.spare / GIB:.2f} GiB left"
    if plan.spare >= 0:
        return (
            f"does not fit, short by {in_gib(-plan.host_spare)} GiB of a node's host memory for "
            "offloading"
        )
    name, size = max(plan.peak.bytes.items(), key=lambda item: item[1])
    return (
        f"does not fit, short by {in_gib(-plan.spare)} GiB; largest: {TITLES[name]}, "
        f"{in_gib(size)} GiB"
    )


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit in which a step of so many seconds is shown, and the number of units in a
    second.
    """
    return ("s", 1.0) if seconds >= 0.1 else ("ms", 1e3)


def time_lines(plan: Plan) -> list[str]:
    total = plan.time.total
    unit, factor = time_unit(total)
    lines = [f"time of one step, an estimate [{unit}]"]
    for name, seconds in plan.time.terms().items():
        if seconds:
            lines.append(f"  {name:26}{factor * seconds:10.3f}{seconds / total:8.1%}")
    lines += map(muon_line, plan.muon)
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    speed = plan.step_tokens / total
    lines.append(
        f"  {'total':26}{factor * total:10.3f}   {speed:,.0f} tokens/s, {speed / plan.ranks:,.0f} "
        f"a device{mfu}"
    )
    units = (("days", DAY), ("hours", HOUR), ("minutes", 60), ("seconds", 1))
    unit, size = next(((name, size) for name, size in units if plan.run_seconds >= size), units[-1])
    device_hours = plan.run_seconds * plan.ranks / HOUR
    tokens = tqdm.format_sizeof(plan.run_tokens).replace("G", "B")
    speed_of = f" at the speed of stage {plan.stage}" if plan.stage else ""
    lines.append(
        f"  the whole run, {tokens} tokens{speed_of}, without evaluation and saving: "
        f"{plan.run_seconds / size:,.1f} {unit}, "
        f"{device_hours:{',.1f' if device_hours >= 1 else '.2g'}} device-hours"
    )
    layer = {name: f"{1e3 * seconds:.3g} ms" for name, seconds in plan.time.layer.as_json().items()}
    recompute = (
        f", of which {layer['again']} recompute activations"
        if plan.time.layer.recompute.total
        else ""
    )
    return [
        *lines,
        f"  a layer, one micro-batch: forward {layer['forward']}, backward "
        f"{layer['backward']}{recompute}",
    ]


def muon_line(update: MatrixUpdate) -> str:
    """Describe what Muon's update takes on the rank with the most of each."""
    flops = tqdm.format_sizeof(float(update.flops.max()))
    plural = "" if update.rounds == 1 else "s"
    return (
        f"  Muon: {update.matrices:,} matrices in {update.rounds} round{plural}; a rank owns "
        f"{update.owned[0].max():,} ({flops}FLOP), sends {in_gib(float(update.sent_bytes.max()))} "
        f"GiB and has {in_gib(float(update.temporaries.max()))} GiB of temporaries"
    )


def dry_run_lines(planned: Point, measured: Point, seconds: float) -> list[str]:
    """Compare the plan's peak with that of a dry run of all layers."""
    return [
        "",
        f"dry run of one micro-batch with all layers: {seconds:.1f} s, model states by formula; "
        f"{measured.total / GIB:.3f} GiB at the peak, the plan differs by "
        f"{planned.total / measured.total - 1:+.2%}",
    ]


def search_lines(search: Search, shown: Sequence[Estimate], plan: Plan) -> list[str]:
    """Return the table of the fastest candidates, and a comparison with the present settings."""
    unit, factor = time_unit(shown[0].time.total)
    lines = [
        "",
        f"{search.fitting} of {len(search.ranked)} settings fit by formulas; "
        "the fastest by estimated time, checked by a dry run:",
        f"{'':4}{f'{unit} a step':>10}{'tokens/s':>12}{'GiB':>8}  settings",
    ]
    for number, candidate in enumerate(shown, start=1):
        seconds = candidate.time.total
        settings = candidate.describe()
        speed = plan.step_tokens / seconds
        needed = candidate.needed / GIB
        lines.append(f"{number:3}.{factor * seconds:10.3f}{speed:12,.0f}{needed:8.1f}  {settings}")
    slower = plan.time.total / shown[0].time.total - 1
    compared = "are as fast as the first"
    if abs(slower) > 0.005:
        compared = f"take {abs(slower):.0%} {'longer' if slower > 0 else 'less'} than the first"
    present = (
        f" fit, {plan.spare / GIB:.2f} GiB left, and {compared}"
        if plan.fits
        else f": {verdict(plan)}"
    )
    return [*lines, f"the present settings{present}"]
