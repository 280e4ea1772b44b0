"""Measures of a process and of a loss that need no model: peak memory, perplexity."""

from __future__ import annotations

import math
from pathlib import Path

from zero_tp.base.constants import GIB


def memory_gib(device_type: str = "cpu") -> float:
    """Return the peak memory of this rank in GiB (2³⁰ bytes).

    On "cuda" the most that torch's allocator had in use (`max_memory_allocated`), without the
    context's 1-2 GB. On "cpu" the most memory that the process had resident, with libraries and
    shared pages.
    """
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated() / GIB
    # Not getrusage: after fork and exec its maximum still is the launcher's.
    return _status_bytes("VmHWM") / GIB


def resident_gib() -> float:
    """Return the memory that this process has resident now, in GiB."""
    return _status_bytes("VmRSS") / GIB


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def perplexity(loss: float) -> float:
    """Return exp(loss), infinite where that overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
