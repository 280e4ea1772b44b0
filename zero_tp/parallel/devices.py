"""Devices: those of the table by name, those that a file describes, and this machine's."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from zero_tp.base.constants import GIB
from zero_tp.base.errors import ConfigError, did_you_mean
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigModel, validate
from zero_tp.parallel.device_table import DEVICES, DeviceSpec

if TYPE_CHECKING:
    import torch

WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
"""Environment variables of a process that sees no accelerator."""

Rate = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(gt=0, le=1)]


class Device(ConfigModel):
    """A device to plan for; also the keys of a user's JSON file."""

    name: str = Field(min_length=1, description="What the plan calls it.")
    memory_gib: Rate = Field(description="Memory that a process sees [GiB].")
    bf16_tflops: Rate | None = Field(
        default=None, description="Dense peak in bf16; leave out where it has none."
    )
    fp16_tflops: Rate | None = Field(
        default=None, description="Dense peak in fp16; leave out where it has none."
    )
    fp32_tflops: Rate = Field(description="Peak in fp32.")
    memory_gbps: Rate = Field(description="Memory bandwidth [GB/s].")
    intra_gbps: Rate = Field(description="Link to devices of the same node, per direction [GB/s].")
    inter_gbps: Rate = Field(description="Link to other nodes, per device and direction [GB/s].")
    host_gbps: Rate = Field(default=25, description="Link to host memory, per direction [GB/s].")
    host_memory_gib: Rate = Field(
        default=1024, description="Host memory of a node [GiB], for what is offloaded."
    )
    per_node: Annotated[int, Field(gt=0, le=2**31 - 1)] = Field(
        default=8, description="Devices of a node."
    )
    units: Annotated[int, Field(gt=0, le=2**31 - 1)] = Field(
        default=1,
        description="Multiprocessors (SMs), which compute the tiles of a matrix product in waves.",
    )
    channels: Annotated[int, Field(ge=0, le=2**31 - 1)] = Field(
        default=0,
        description="Multiprocessors that a collective takes from concurrent matrix products.",
    )
    matrix_share: Share = Field(
        default=0.8, description="Share of the matrix peak that the best products reach."
    )
    memory_share: Share = Field(
        default=0.8, description="Share of the memory bandwidth that is reached."
    )
    link_share: Share = Field(
        default=0.75, description="Share of the links of a node that collectives reach."
    )
    inter_share: Share = Field(
        default=0.5, description="Share of the links between nodes that collectives reach."
    )
    context_gib: Annotated[float, Field(ge=0, le=1e9)] = Field(
        default=0.92, description="Taken by the process's context and kernels [GiB]."
    )
    communicator_gib: Annotated[float, Field(ge=0, le=1e9)] = Field(
        default=0.67,
        description="Taken by each communicator, that is each process group of two ranks or more "
        "[GiB].",
    )
    varlen: bool = Field(
        default=True,
        description="Runs torch's `varlen_attn`, so that documents and windows need no mask.",
    )
    fragmentation: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05,
        description="Margin for the allocator's fragmentation, as a share of the allocated memory.",
    )

    def tflops(self, dtype: str) -> float | None:
        """Return the dense peak in "fp32", "bf16" or "fp16"; None where the device has none."""
        return {"fp32": self.fp32_tflops, "bf16": self.bf16_tflops, "fp16": self.fp16_tflops}[dtype]

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


NAMES = (*(name for row in DEVICES for name in row.memory_gib), "cpu")


def named_device(name: str, ranks: int = 1) -> Device:
    """Return a device by its name, ignoring case.

    "h100" is enough if the table has one size; "v100" is the one with 32 GB.

    Args:
        name: one of NAMES, or the path of a .json file that describes a device.
        ranks: number of ranks of the run; CPU ranks share one machine's memory and cores.
    """
    if name.endswith(".json"):
        remedy = f"give the path of a device's JSON file, or one of {', '.join(NAMES)}"
        device = validate(Device, read_json(Path(name), remedy), name)
        if device.channels > device.units:
            problem = f"{device.channels} exceeds units, {device.units}"
            raise ConfigError(
                f"{name}.channels", problem, "set units to the device's number of multiprocessors"
            )
        return device
    key = name.lower().replace("_", "-").replace("rtx-", "rtx")
    if key == "cpu":
        return _cpu_device(ranks)
    rows = {known: row for row in DEVICES for known in row.memory_gib}
    if key == "v100":
        key = "v100-32gb"
    candidates = [known for known in rows if known.split("-")[0] == key]
    key = candidates[0] if len(candidates) == 1 else key
    if key not in rows:
        hint = did_you_mean(key, NAMES)
        names = f"one of {', '.join(NAMES)}, or a JSON file (docs/planning.md)"
        raise ConfigError(
            "--device", f"{name!r} is unknown", hint if "?" in hint else f"use {names}"
        )
    row = rows[key]
    return Device(
        name=key,
        memory_gib=row.memory_gib[key],
        bf16_tflops=row.bf16,
        fp16_tflops=row.fp16,
        fp32_tflops=row.fp32,
        **row.fields,
    )


def _cpu_device(ranks: int) -> Device:
    """Return one CPU rank as a device: its share of this machine's memory and cores. The rates
    are rough.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    # Ranks on CPUs share cores and bandwidth, so a plan for N of them divides both.
    cores_per_rank = (os.cpu_count() or 1) / ranks
    share = min(1.0, cores_per_rank)
    return Device(
        name="cpu",
        memory_gib=memory / ranks,
        bf16_tflops=0.06 * cores_per_rank,
        fp32_tflops=0.06 * cores_per_rank,
        memory_gbps=10 * share,
        intra_gbps=1.0,
        inter_gbps=1.0,
        host_gbps=10,
        host_memory_gib=memory,
        per_node=max(1, ranks),
        context_gib=0.5 if memory / ranks > 1 else 0.1,
        communicator_gib=0,
    )


# ---- the device that a run computes on -----------------------------------------------------------


def find_device_spec(name: str) -> DeviceSpec | None:
    """Return the table's row for a device name of torch.

    None for an unknown device, and for a MIG slice, which has a part of its device's rates.
    """
    if re.search(r"\bMIG\b", name):
        return None
    return next((row for row in DEVICES if re.search(row.pattern, name)), None)


def peak_flops(name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense peak of the device called `name` [FLOP/s] in `dtype`; None where unknown.

    An unknown device has no MFU, rather than a wrong one.

    Args:
        tf32: fp32 matrices are multiplied as TF32 (`torch.backends.cuda.matmul.allow_tf32`).
    """
    row = find_device_spec(name)
    if row is None:
        return None
    rates = {"bfloat16": row.bf16, "float16": row.fp16, "float32": row.tf32 if tf32 else row.fp32}
    rate = rates.get(str(dtype).removeprefix("torch."))
    return None if rate is None else rate * 1e12


def describe_devices(device: torch.device, ranks: int) -> str:
    """Return the devices of a run in words: `4 × NVIDIA H100 80GB HBM3`, `1 × CPU`."""
    import torch

    name = (
        "CPU" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)
    )
    return f"{ranks} × {name}"


@functools.cache
def runs_flash(device: torch.device) -> bool:
    """Return whether torch's flash kernels for packed documents (`varlen_attn`) and the compiled
    ones of `flex_attention` run on `device`.

    They need CUDA and compute capability 8.0. Whether AMD's kernels support sliding windows is
    unknown.
    """
    import torch

    return (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
