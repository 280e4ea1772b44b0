"""Peak matrix rates of devices, for MFU: a table for accelerators, a measurement for CPUs.

The table holds the vendors' figures for dense matrices (where a datasheet prints them with 2:4 sparsity, half of that)
with fp32 accumulation. An unknown device has no peak: no MFU is better than a wrong one.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Device:
    """Dense peak rates in TFLOP/s; None where the matrix units don't have the type."""

    pattern: str  # searched in torch.cuda.get_device_name()
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str


# The first match counts: the special forms of a model stand before its plain name.
DEVICES = (
    Device(r"\bV100S-PCIE\b", None, 130.0, None, 16.4, "NVIDIA V100 datasheet, 2020"),
    Device(r"\bV100-PCIE\b", None, 112.0, None, 14.0, "NVIDIA V100 datasheet, 2020"),
    Device(r"\bV100-SXM\d\b", None, 125.0, None, 15.7, "NVIDIA V100 datasheet, 2020"),
    Device(r"\bA100\b", 312.0, 312.0, 156.0, 19.5, "NVIDIA A100 datasheet, 2021 (SXM and PCIe are equal)"),
    Device(r"\bH100 PCIe\b", 756.0, 756.0, 378.0, 51.0, "NVIDIA H100 datasheet, 2022"),
    Device(r"\bH100 NVL\b", 835.0, 835.0, 417.0, 60.0, "NVIDIA H100 datasheet, 2024"),
    Device(r"\bH100 80GB HBM3\b", 989.0, 989.0, 494.0, 67.0, "NVIDIA H100 datasheet, 2023 (SXM)"),
    Device(r"\bH200 NVL\b", 835.0, 835.0, 417.0, 60.0, "NVIDIA H200 datasheet, 2024"),
    Device(r"\bH200\b", 989.0, 989.0, 494.0, 67.0, "NVIDIA H200 datasheet, 2024 (SXM)"),
    Device(r"\bB200\b", 2250.0, 2250.0, 1100.0, 75.0, "NVIDIA HGX B200 datasheet, 2025, one of eight"),
    Device(r"\bMI300X\b", 1307.4, 1307.4, 653.7, 163.4, "AMD Instinct MI300X datasheet, 2023"),
    Device(r"\bL40S\b", 362.0, 362.0, 183.0, 91.6, "NVIDIA L40S datasheet, 2023"),
    Device(r"\bRTX 4090$", 165.2, 165.2, 82.6, 82.6, "NVIDIA Ada GPU architecture whitepaper, 2022, appendix A"),
)


def find_device(name: str) -> Device | None:
    """The table's row for a device name as torch gives it; None for an unknown one or a MIG slice."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)


def peak_flops(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Dense peak of the device called `name` [FLOP/s] in `dtype`; None where unknown.

    Args:
        tf32: fp32 matrices are multiplied as TF32 (`torch.backends.cuda.matmul.allow_tf32`).
    """
    device = find_device(name)
    if device is None:
        return None
    rates = {"bfloat16": device.bf16, "float16": device.fp16, "float32": device.tf32 if tf32 else device.fp32}
    rate = rates.get(str(dtype).removeprefix("torch."))
    return None if rate is None else rate * 1e12


def measure_cpu_flops(
    dtype: torch.dtype, barrier: Callable[[], object], size: int = 1024, repeats: int = 5, limit_seconds: float = 0.5
) -> float:
    """What one rank reaches in a square matrix product in `dtype` [FLOP/s], while all the others do the same.

    The ranks of a machine share its cores and memory, so it is measured on all at once. The median of up to `repeats`
    products of 2·size³ FLOPs after one that warms up; no new one starts after `limit_seconds`.

    Args:
        barrier: waits for the other ranks; called once, by every rank.
    """
    import torch

    left = torch.ones(size, size, dtype=dtype)
    right = torch.ones(size, size, dtype=dtype)
    torch.mm(left, right)
    barrier()
    seconds: list[float] = []
    end = time.perf_counter() + limit_seconds
    while not seconds or (len(seconds) < repeats and time.perf_counter() < end):
        start = time.perf_counter()
        torch.mm(left, right)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / statistics.median(seconds)


def device_peak_flops(device_type: str, dtype: torch.dtype, barrier: Callable[[], object]) -> float | None:
    """The peak of this rank's device [FLOP/s]: from the table, on "cpu" measured (then all ranks must call)."""
    if device_type == "cpu":
        return measure_cpu_flops(dtype, barrier)
    if device_type != "cuda":
        return None
    import torch

    return peak_flops(torch.cuda.get_device_name(), dtype, torch.backends.cuda.matmul.allow_tf32)
