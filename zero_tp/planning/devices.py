"""Devices to plan for: memory, rates and links, from a table or from a person's own JSON file.

Peak matrix rates are those of planning/hardware.py. Memory is what a process sees (torch's `total_memory`), which is
less than the name says. Links are per device and direction; between nodes they are a property of the cluster: the table
has what is usual (a network port a device). The reached shares are a typical well-fed run's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from zero_tp.config.schema import Block
from zero_tp.config.source import read_json
from zero_tp.config.validation import validate
from zero_tp.constants import GIB
from zero_tp.errors import ConfigError, did_you_mean
from zero_tp.planning.hardware import find_device

Rate = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class Device(Block):
    """One device. A person's own JSON file has these keys."""

    name: str = Field(min_length=1, description="What the plan calls it.")
    memory_gib: Rate = Field(description="Memory that a process sees [GiB].")
    bf16_tflops: Rate | None = Field(default=None, description="Dense peak in bf16; leave out where it has none.")
    fp16_tflops: Rate | None = Field(default=None, description="Dense peak in fp16; leave out where it has none.")
    fp32_tflops: Rate = Field(description="Peak in fp32.")
    memory_gbps: Rate = Field(description="Memory bandwidth [GB/s].")
    intra_gbps: Rate = Field(description="Link to devices of the same node, per direction [GB/s].")
    inter_gbps: Rate = Field(description="Link to other nodes, per device and direction [GB/s].")
    host_gbps: Rate = Field(default=25, description="Link to host memory, per direction [GB/s].")
    host_memory_gib: Rate = Field(default=1024, description="Host memory of a node [GiB], for what is offloaded.")
    per_node: Annotated[int, Field(gt=0)] = Field(default=8, description="Devices of a node.")
    matrix_share: Share = Field(default=0.7, description="Share of the matrix peak that large products reach.")
    memory_share: Share = Field(default=0.8, description="Share of the memory bandwidth that is reached.")
    link_share: Share = Field(default=0.75, description="Share of the links' bandwidth that collectives reach.")
    reserved_gib: Annotated[float, Field(ge=0)] = Field(
        default=1.5, description="Taken by the context, kernels and communication buffers [GiB]."
    )
    fragmentation: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="Margin for the allocator's gaps, of what is allocated."
    )

    @property
    def usable(self) -> float:
        """Bytes that tensors may take at most."""
        return (self.memory_gib - self.reserved_gib) * GIB / (1 + self.fragmentation)

    def tflops(self, dtype: str) -> float | None:
        """Dense peak in "fp32", "bf16" or "fp16"; None where it has none."""
        return {"fp32": self.fp32_tflops, "bf16": self.bf16_tflops, "fp16": self.fp16_tflops}[dtype]

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


# name, name that torch gives, GiB, GB/s of memory, of links in a node and between nodes, of the host, devices a node
_TABLE = (
    ("v100-16gb", "Tesla V100-SXM2-16GB", 15.8, 900, 150, 12.5, 12, 8),
    ("v100-32gb", "Tesla V100-SXM2-32GB", 31.7, 900, 150, 12.5, 12, 8),
    ("a100-40gb", "NVIDIA A100-SXM4-40GB", 39.4, 1555, 300, 25, 25, 8),
    ("a100-80gb", "NVIDIA A100-SXM4-80GB", 79.2, 2039, 300, 25, 25, 8),
    ("h100-80gb", "NVIDIA H100 80GB HBM3", 79.1, 3350, 450, 50, 50, 8),
    ("h200-141gb", "NVIDIA H200", 139.8, 4800, 450, 50, 50, 8),
    ("b200-180gb", "NVIDIA B200", 178.3, 8000, 900, 50, 50, 8),
    ("mi300x-192gb", "AMD Instinct MI300X", 191.5, 5300, 448, 50, 50, 8),
    ("l40s-48gb", "NVIDIA L40S", 44.5, 864, 32, 25, 25, 8),
    ("rtx4090-24gb", "NVIDIA GeForce RTX 4090", 23.6, 1008, 32, 12.5, 25, 8),
)
NAMES = (*(row[0] for row in _TABLE), "cpu")
_SHORT = {
    "v100": "v100-32gb",
    "h100": "h100-80gb",
    "h200": "h200-141gb",
    "b200": "b200-180gb",
    "mi300x": "mi300x-192gb",
    "l40s": "l40s-48gb",
    "rtx4090": "rtx4090-24gb",
    "rtx-4090": "rtx4090-24gb",
}


def device(name: str, ranks: int = 1) -> Device:
    """The device of a name in NAMES, or that of a JSON file.

    Args:
        ranks: of the run; CPU ranks share one machine's memory and cores.

    Raises:
        ConfigError: an unknown name, or a file that does not describe a device.
    """
    if name.endswith(".json"):
        return validate(Device, read_json(Path(name)), name)
    key = name.lower().replace("_", "-")
    key = _SHORT.get(key, key)
    if key == "cpu":
        return _this_cpu(ranks)
    for row in _TABLE:
        if row[0] == key:
            _, torch_name, memory, bandwidth, intra, inter, host, per_node = row
            rates = find_device(torch_name)
            assert rates is not None, torch_name
            return Device(
                name=key,
                memory_gib=memory,
                bf16_tflops=rates.bf16,
                fp16_tflops=rates.fp16,
                fp32_tflops=rates.fp32,
                memory_gbps=bandwidth,
                intra_gbps=intra,
                inter_gbps=inter,
                host_gbps=host,
                per_node=per_node,
            )
    hint = did_you_mean(key, NAMES)
    known = f"one of {', '.join(NAMES)}, or a JSON file (docs/planning.md)"
    raise ConfigError("--device", f"{name!r} is unknown", hint if "?" in hint else f"use {known}")


def _this_cpu(ranks: int) -> Device:
    """A rank on this machine: its share of the memory and of the cores. The rates are rough."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = max(1.0, (os.cpu_count() or 1) / ranks) if ranks else 1.0
    share = min(1.0, (os.cpu_count() or 1) / ranks)
    return Device(
        name="cpu",
        memory_gib=memory / ranks,
        bf16_tflops=0.06 * cores * share,
        fp32_tflops=0.06 * cores * share,
        memory_gbps=10 * share,
        intra_gbps=1.0,
        inter_gbps=1.0,
        host_gbps=10,
        host_memory_gib=memory,
        per_node=max(1, ranks),
        reserved_gib=0.5 if memory / ranks > 1 else 0.1,
    )
