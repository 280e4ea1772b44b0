"""Put a plan into words, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from zero_tp.constants import GIB
from zero_tp.planning.memory import CATEGORIES
from zero_tp.planning.plan import Comparison, Plan
from zero_tp.planning.search import Candidate, Search

TITLES = {
    "parameters": "parameters",
    "gathered": "gathered by ZeRO-3",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "buffers": "buckets, temporaries",
    "activations": "activations",
    "transients": "transients",
}
PHASES = {"forward": "forward", "backward": "backward", "reduce": "the end of backward", "step": "the optimizer's step"}


def describe(plan: Plan) -> str:
    """Return the whole plan, some thirty lines."""
    return "\n".join([*heading(plan), "", *memory(plan), "", *time(plan)])


def heading(plan: Plan) -> list[str]:
    config, block = plan.config, plan.config.zero_tp
    model, parameters = config.hf_config(), plan.model.whole
    sizes = f"TP {block.parallel.tensor} × DP {config.data_parallel}"
    stages = f" × {plan.pipeline} pipeline stages" if plan.pipeline > 1 else ""
    sequence = ", SP" if block.parallel.sequence else ""
    return [
        f"{model.model_type}, {parameters:,} parameters, {plan.model.parameters.total:,} a TP rank",
        f"{plan.ranks} × {plan.device.name} = {sizes}{stages}{sequence}, ZeRO-{config.zero_stage}, {config.dtype}, "
        f"recompute {block.recompute_policy.mode}, {block.attention}",
        f"{config.global_batch} × {block.data.sequence_length} tokens a step = micro {config.micro_batch} × "
        f"accumulation {config.accumulation} × data {config.data_parallel}",
        *(["NVMe is counted as host memory"] if config.nvme_paths else []),
    ]


def memory(plan: Plan) -> list[str]:
    paper, peak = plan.paper.bytes(), plan.peak
    paper["activations"] += paper.pop("outside layers")
    if plan.pipeline > 1:
        # A run has no pipeline, so nothing is said of what it would allocate.
        lines = [f"{'memory of one device [GiB]':28}{'papers':>10}"]
        lines += [f"  {TITLES[name]:26}{size / GIB:10.2f}" for name, size in paper.items()]
        return [*lines, f"  {'together':26}{sum(paper.values()) / GIB:10.2f} of {plan.device.memory_gib:.4g}"]
    lines = [f"{'memory of one device [GiB]':28}{'papers':>10}{'allocated':>12}"]
    for name in CATEGORIES:
        if not peak.bytes[name] and not paper.get(name):
            continue
        counted = f"{paper[name] / GIB:10.2f}" if name in paper else " " * 10
        lines.append(f"  {TITLES[name]:26}{counted}{peak.bytes[name] / GIB:12.2f}")
    device, together = plan.device, peak.total
    if device.is_cpu and peak.host:
        lines.append(f"  {'offloaded':26}{'':10}{peak.host / GIB:12.2f}")
        together += peak.host
    lines.append(f"  {'together':26}{sum(paper.values()) / GIB:10.2f}{together / GIB:12.2f}")
    gaps = together * device.fragmentation / GIB
    lines.append(
        f"  the peak is in {PHASES[peak.phase]}; with {device.reserved_gib:g} GiB for context and kernels and "
        f"{gaps:.2f} for gaps {plan.needed / GIB:.2f} of {device.memory_gib:.4g} GiB: {verdict(plan)}"
    )
    if plan.memory.host and not device.is_cpu:
        node = min(device.per_node, plan.ranks)
        each, together = plan.memory.host / GIB, node * plan.memory.host / GIB
        lines.append(
            f"  host memory: {each:.2f} GiB a rank, {together:.1f} of {device.host_memory_gib:.4g} for {node} of a node"
        )
    return lines


def verdict(plan: Plan) -> str:
    """Say whether it fits, and what is the largest part of it."""
    if plan.fits:
        return f"fits, {plan.spare / GIB:.2f} GiB left"
    if plan.spare >= 0:
        return f"does not fit, short by {-plan.host_spare / GIB:.1f} GiB of host memory a node for what is offloaded"
    name, size = max(plan.peak.bytes.items(), key=lambda item: item[1])
    return (
        f"does not fit, short by {-plan.spare / GIB:.2f} GiB; the most are {TITLES[name]}, {size / GIB:.2f} "
        "(--search tries other settings)"
    )


def time(plan: Plan) -> list[str]:
    lines = ["time of one step, an estimate [s]"]
    for name, seconds in plan.time.terms().items():
        if seconds:
            lines.append(f"  {name:26}{seconds:10.3f}{seconds / plan.time.total:8.1%}")
    total = plan.time.total
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    speed = plan.tokens / total
    lines.append(f"  {'together':26}{total:10.3f}   {speed:,.0f} tokens/s, {speed / plan.ranks:,.0f} a device{mfu}")
    layer = {name: f"{1e3 * seconds:.3g} ms" for name, seconds in plan.time.layer.as_json().items()}
    again = f", of which {layer['again']} make again what it needs" if plan.time.layer.again.total else ""
    return [*lines, f"  a layer, one micro-batch: forward {layer['forward']}, backward {layer['backward']}{again}"]


def dry_run(comparison: Comparison) -> list[str]:
    lines = [
        "",
        f"dry run of one micro-batch with all layers: {comparison.seconds:.1f} s, model states by formula",
        f"{'at the peak [GiB]':28}{'all layers':>10}{'planned':>12}",
    ]
    whole, planned = comparison.whole, comparison.planned
    for name in CATEGORIES:
        if whole.bytes[name] or planned.bytes[name]:
            lines.append(f"  {TITLES[name]:26}{whole.bytes[name] / GIB:10.3f}{planned.bytes[name] / GIB:12.3f}")
    difference = planned.total / whole.total - 1
    return [*lines, f"  {'together':26}{whole.total / GIB:10.3f}{planned.total / GIB:12.3f}   {difference:+.2%}"]


def advice(search: Search, shown: Sequence[Candidate], plan: Plan) -> list[str]:
    """Return the table of the fastest candidates, and why the present settings are not among them."""
    lines = [
        "",
        f"by formulas {search.fitting} of {len(search.ranked)} settings fit; the fastest (an estimate), run dry:",
        f"{'':4}{'s a step':>10}{'tokens/s':>12}{'GiB':>8}  settings",
    ]
    for number, one in enumerate(shown, start=1):
        speed = plan.tokens / one.time.total
        lines.append(f"{number:3}.{one.time.total:10.3f}{speed:12,.0f}{one.needed / GIB:8.1f}  {one.choice.describe()}")
    if plan.fits:
        best = shown[0].time.total if shown else plan.time.total
        slower = plan.time.total / best - 1
        lines.append(
            f"the present settings fit, {plan.spare / GIB:.2f} GiB left, "
            + (f"and take {slower:.0%} longer than the first" if slower > 0.005 else "and are as fast as the first")
        )
    else:
        lines.append(f"the present settings: {verdict(plan).replace(' (--search tries other settings)', '')}")
    return lines
