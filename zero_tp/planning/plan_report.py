"""Describe a plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from zero_tp.constants import GIB
from zero_tp.planning.memory import CATEGORIES, Point
from zero_tp.planning.plan import DAY, HOUR, Estimate, Plan
from zero_tp.planning.search import Search

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
    """Return the whole plan as text."""
    return "\n".join([*heading(plan), "", *memory(plan), "", *time(plan)])


def heading(plan: Plan) -> list[str]:
    config, block = plan.config, plan.config.zero_tp
    model, parameters = config.hf_config(), plan.model.whole
    sizes = f"TP {block.parallel.tensor} × DP {config.data_parallel}"
    sequence = ", SP" if block.parallel.sequence else ""
    active, experts = "", plan.model.spec.experts
    if experts is not None:
        active = f" ({plan.model.active:,} active: {experts.per_token} of {experts.count} experts)"
    return [
        f"{model.model_type}, {parameters:,} parameters{active}, {plan.model.parameters.total:,} a TP rank",
        *(["assumed: every expert of a layer gets as many tokens as any other"] if experts is not None else []),
        f"{plan.ranks} × {plan.device.name} = {sizes}{sequence}, ZeRO-{config.zero_stage}, {config.dtype}, "
        f"recompute {block.recompute_policy.mode}, {block.attention}",
        f"{config.global_batch} × {block.data.sequence_length} tokens a step = micro {config.micro_batch} × "
        f"accumulation {config.accumulation} × data {config.data_parallel}",
        *(["NVMe is counted as host memory"] if config.nvme_paths else []),
    ]


def memory(plan: Plan) -> list[str]:
    paper, peak, device = plan.paper.bytes(), plan.peak, plan.device
    paper["activations"] += paper.pop("outside layers")
    lines = [f"{'memory of one device [GiB]':28}{'by papers':>10}{'allocated':>12}"]
    for name in CATEGORIES:
        if peak.bytes[name] or paper.get(name):
            counted = f"{paper[name] / GIB:10.2f}" if name in paper else " " * 10
            lines.append(f"  {TITLES[name]:26}{counted}{peak.bytes[name] / GIB:12.2f}")
    if device.is_cpu and peak.host:
        lines.append(f"  {'offloaded':26}{'':10}{peak.host / GIB:12.2f}")
    lines.append(f"  {'total':26}{sum(paper.values()) / GIB:10.2f}{plan.tensor_bytes / GIB:12.2f}")
    hint = " (--search tries other settings)" if plan.spare < 0 else ""
    plural = "" if plan.communicators == 1 else "s"
    lines.append(
        f"  the peak is in {PHASES[peak.phase]}: {plan.tensor_bytes / GIB:.2f} GiB of tensors + "
        f"{plan.reserved / GIB:.2f} for the context and {plan.communicators} communicator{plural} + "
        f"{plan.tensor_bytes * device.fragmentation / GIB:.2f} for fragmentation = {plan.needed / GIB:.2f} of "
        f"{device.memory_gib:.4g} GiB: {verdict(plan)}{hint}"
    )
    if plan.host_needed:
        lines.append(
            f"  host memory: {plan.memory.host / GIB:.2f} GiB a rank, {plan.host_needed / GIB:.1f} of "
            f"{device.host_memory_gib:.4g} for the node's {min(device.per_node, plan.ranks)} ranks"
        )
    return lines


def verdict(plan: Plan) -> str:
    """Return whether the run fits, and which category is the largest if it does not."""
    if plan.fits:
        return f"fits, {plan.spare / GIB:.2f} GiB left"
    if plan.spare >= 0:
        return f"does not fit, short by {-plan.host_spare / GIB:.1f} GiB of a node's host memory for offloading"
    name, size = max(plan.peak.bytes.items(), key=lambda item: item[1])
    return f"does not fit, short by {-plan.spare / GIB:.2f} GiB; largest: {TITLES[name]}, {size / GIB:.2f} GiB"


def time(plan: Plan) -> list[str]:
    lines = ["time of one step, an estimate [s]"]
    for name, seconds in plan.time.terms().items():
        if seconds:
            lines.append(f"  {name:26}{seconds:10.3f}{seconds / plan.time.total:8.1%}")
    total = plan.time.total
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    speed = plan.step_tokens / total
    lines.append(f"  {'total':26}{total:10.3f}   {speed:,.0f} tokens/s, {speed / plan.ranks:,.0f} a device{mfu}")
    days, hours = plan.run_seconds / DAY, plan.run_seconds * plan.ranks / HOUR
    length = f"{days:,.1f} days" if days >= 1 else f"{24 * days:,.1f} hours"
    tokens = tqdm.format_sizeof(plan.run_tokens).replace("G", "B")
    lines.append(
        f"  the whole run, {tokens} tokens, without evaluation and saving: {length}, {hours:,.1f} device-hours"
    )
    layer = {name: f"{1e3 * seconds:.3g} ms" for name, seconds in plan.time.layer.as_json().items()}
    recompute = f", of which {layer['again']} recompute activations" if plan.time.layer.recompute.total else ""
    return [*lines, f"  a layer, one micro-batch: forward {layer['forward']}, backward {layer['backward']}{recompute}"]


def dry_run(planned: Point, measured: Point, seconds: float) -> list[str]:
    """Return lines that compare the plan's peak with a dry run of all layers."""
    return [
        "",
        f"dry run of one micro-batch with all layers: {seconds:.1f} s, model states by formula; "
        f"{measured.total / GIB:.3f} GiB at the peak, the plan differs by {planned.total / measured.total - 1:+.2%}",
    ]


def advice(search: Search, shown: Sequence[Estimate], plan: Plan) -> list[str]:
    """Return the table of the fastest candidates, and a comparison with the present settings."""
    lines = [
        "",
        f"{search.fitting} of {len(search.ranked)} settings fit by formulas; "
        "the fastest by estimated time, checked by a dry run:",
        f"{'':4}{'s a step':>10}{'tokens/s':>12}{'GiB':>8}  settings",
    ]
    for number, candidate in enumerate(shown, start=1):
        seconds, settings = candidate.time.total, candidate.describe()
        speed, needed = plan.step_tokens / seconds, candidate.needed / GIB
        lines.append(f"{number:3}.{seconds:10.3f}{speed:12,.0f}{needed:8.1f}  {settings}")
    slower = plan.time.total / shown[0].time.total - 1
    compared = f"take {slower:.0%} longer than the first" if slower > 0.005 else "are as fast as the first"
    present = f" fit, {plan.spare / GIB:.2f} GiB left, and {compared}" if plan.fits else f": {verdict(plan)}"
    return [*lines, f"the present settings{present}"]
