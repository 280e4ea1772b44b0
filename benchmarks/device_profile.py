"""Sum up a profile of one step: milliseconds and launches by class of kernel, idle time, and how
often the host waits for the device.

On a CPU the operations of ATen that call no other stand for kernels.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

CLASSES = {
    "attention": r"sdpa|flash|fmha|attention",
    "products": r"gemm|nvjet|cutlass|cublas|wgmma|splitk|::(?:addmm|mm|bmm)$|grouped_mm",
    "communication": r"nccl",
    "optimizer": r"multi_tensor|adam",
    "compiled": r"triton_|cpp_fused",
    "copies": r"memcpy|memset|copy",
    "reductions": r"reduce|norm|sum$|softmax",
}
"""Class of a kernel → what its name has; the first that fits. Others are "elementwise"."""
WAITS = r"^cuda(?:Device|Stream|Event)Synchronize$|^cudaMemcpy$|::item$|::_local_scalar_dense$"
"""Calls in which the host waits for the device."""
LISTED = 20


class Span(NamedTuple):
    """A kernel or a call of the host, in ns."""

    name: str
    begin: int
    end: int


def class_of(name: str) -> str:
    """Return the class of a kernel."""
    fits = (kind for kind, words in CLASSES.items() if re.search(words, name, re.IGNORECASE))
    return next(fits, "elementwise")


def busy_time(kernels: Iterable[Span]) -> int:
    """Return the ns in which at least one kernel runs."""
    total = reached = 0
    for kernel in sorted(kernels, key=lambda span: span.begin):
        total += max(0, kernel.end - max(kernel.begin, reached))
        reached = max(reached, kernel.end)
    return total


def summarise(kernels: list[Span], calls: Iterable[Span]) -> dict[str, Any]:
    """Return the figures of a step.

    Args:
        kernels: of the device; at least one.
        calls: of the host.
    """
    by_class: dict[str, list[int]] = defaultdict(list)
    by_name: dict[str, list[int]] = defaultdict(list)
    for kernel in kernels:
        by_class[class_of(kernel.name)].append(kernel.end - kernel.begin)
        by_name[kernel.name[:100]].append(kernel.end - kernel.begin)
    span = max(kernel.end for kernel in kernels) - min(kernel.begin for kernel in kernels)
    busy = busy_time(kernels)
    waits: dict[str, int] = defaultdict(int)
    for call in calls:
        if re.search(WAITS, call.name):
            waits[call.name] += 1
    longest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:LISTED]
    return {
        "span_ms": span / 1e6,
        "busy_ms": busy / 1e6,
        "idle_ms": (span - busy) / 1e6,
        "launches": len(kernels),
        "classes": {name: _row(times) for name, times in sorted(by_class.items())},
        "longest": {name: _row(times) for name, times in longest},
        "synchronisations": dict(waits),
    }


def _row(times: list[int]) -> dict[str, float]:
    return {"ms": sum(times) / 1e6, "launches": len(times)}


def profile_step(step: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Profile a step and sum it up."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    results: Any = profiler.profiler
    kernels: list[Span] = []
    calls: list[Span] = []
    for event in results.kineto_results.events():
        if event.is_user_annotation():  # a range of others, on the device, too
            continue
        span = Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        on_device = event.device_type() != torch.autograd.DeviceType.CPU
        (kernels if on_device else calls).append(span)
    return summarise(kernels or innermost(calls), calls)


def innermost(calls: Iterable[Span]) -> list[Span]:
    """Return the operations of ATen and compiled kernels within which no other runs."""
    operations = [call for call in calls if re.match(r"aten::|cpp_fused|graph_", call.name)]
    operations.sort(key=lambda span: (span.begin, -span.end))
    pairs = zip(operations, [*operations[1:], None], strict=True)
    return [one for one, following in pairs if following is None or following.begin >= one.end]
