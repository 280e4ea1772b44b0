"""A table of devices: matrix rates, memory and links.

Rates are datasheet peaks for dense matrices with fp32 accumulation (half of a figure that includes
2:4 sparsity). Memory is torch's `total_memory`, which is less than the name says. Links are per
device and direction; links between nodes depend on the cluster, and the table assumes one network
port per device. For a device without memory and links in the table, runs report an MFU, but
`zero-tp plan` can't plan.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from zero_tp.base.constants import GIB
from zero_tp.base.errors import ConfigError, did_you_mean
from zero_tp.base.strict_json import read_json
from zero_tp.base.validation import ConfigModel, validate

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


class DeviceSpec(NamedTuple):
    """The table's row for one kind of device.

    Attributes:
        pattern: searched in `torch.cuda.get_device_name()`.
        bf16, fp16, tf32, fp32: dense peaks [TFLOP/s]; None if the matrix units don't have the type.
        source: of the peaks.
        memory_gib: name for `--device` → memory that a process sees [GiB]; {} if the device can't
            be planned for.
        fields: the other fields of `Device`, for plans.
    """

    pattern: str
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str
    memory_gib: dict[str, float] = {}  # noqa: RUF012 - never changed
    fields: dict[str, Any] = {}  # noqa: RUF012 - never changed


def _fields(
    memory: float, intra: float, inter: float, host: float, **others: Any
) -> dict[str, Any]:
    """Name the bandwidths of a `Device` [GB/s]: memory, links in the node, between nodes, to the
    host.
    """
    return {
        "memory_gbps": memory,
        "intra_gbps": intra,
        "inter_gbps": inter,
        "host_gbps": host,
        **others,
    }


# The first match counts, so the variants of a model precede its plain name.
# `matrix_share`: Bekman, "Machine Learning Engineering", table of maximum achievable matmul FLOPS,
# 2024 to 2026. V100: a product of 8192³ (forums.developer.nvidia.com/t/79781). A100-PCIE-40GB and
# H20: the best of five square products (github.com/zzc0721/torch-performance-test-data, issues 108
# and 77). `channels`: NCCL's own log ("24 coll channels"), one multiprocessor each
# (github.com/NVIDIA/nccl/issues/1656).
DEVICES = (
    DeviceSpec(r"\bV100S-PCIE\b", None, 130, None, 16.4, "NVIDIA V100 datasheet, 2020"),
    DeviceSpec(r"\bV100-PCIE\b", None, 112, None, 14, "NVIDIA V100 datasheet, 2020"),
    DeviceSpec(
        r"\bV100-SXM\d\b",
        None,
        125,
        None,
        15.7,
        "NVIDIA V100 datasheet, 2020",
        {"v100-16gb": 15.8, "v100-32gb": 31.7},
        _fields(900, 150, 12.5, 12, units=80, channels=12, matrix_share=0.9, varlen=False),
    ),
    # Cards reach all others of a node over PCIe 4; NVLink bridges join them in pairs.
    DeviceSpec(
        r"\bA100-PCIE-40GB\b",
        312,
        312,
        156,
        19.5,
        "NVIDIA A100 datasheet, 2021; product brief PB-10137, 2020",
        {"a100-pcie-40gb": 39.4},
        _fields(1555, 32, 25, 25, units=108, matrix_share=0.774),
    ),
    DeviceSpec(
        r"\bA100 80GB PCIe\b",
        312,
        312,
        156,
        19.5,
        "NVIDIA A100 datasheet, 2021",
        {"a100-pcie-80gb": 79.1},
        _fields(1935, 32, 25, 25, units=108),
    ),
    DeviceSpec(
        r"\bA800-SXM4-80GB\b",
        312,
        312,
        156,
        19.5,
        "NVIDIA A800 datasheet, 2022: the A100's rates, NVLink 400 GB/s",
        {"a800-80gb": 79.2},
        _fields(2039, 200, 25, 25, units=108),
    ),
    DeviceSpec(r"\bA800\b", 312, 312, 156, 19.5, "NVIDIA A800 datasheet, 2022 (PCIe and 40 GB)"),
    DeviceSpec(
        r"\bA100\b.*-40GB",
        312,
        312,
        156,
        19.5,
        "NVIDIA A100 datasheet, 2021 (SXM)",
        {"a100-40gb": 39.4},
        _fields(1555, 300, 25, 25, units=108, channels=24, matrix_share=0.859),
    ),
    DeviceSpec(
        r"\bA100\b",
        312,
        312,
        156,
        19.5,
        "NVIDIA A100 datasheet, 2021 (SXM)",
        {"a100-80gb": 79.2},
        _fields(2039, 300, 25, 25, units=108, channels=24, matrix_share=0.859),
    ),
    DeviceSpec(r"\bH100 PCIe\b", 756, 756, 378, 51, "NVIDIA H100 datasheet, 2022"),
    DeviceSpec(r"\bH100 NVL\b", 835, 835, 417, 60, "NVIDIA H100 datasheet, 2024"),
    DeviceSpec(
        r"\bH100 80GB HBM3\b",
        989,
        989,
        494,
        67,
        "NVIDIA H100 datasheet, 2023 (SXM)",
        {"h100-80gb": 79.1},
        _fields(3350, 450, 50, 50, units=132, channels=24, matrix_share=0.801),
    ),
    DeviceSpec(
        r"\bH800 PCIe\b", 756, 756, 378, 51, "NVIDIA H800 datasheet, 2023: the H100 PCIe's rates"
    ),
    DeviceSpec(
        r"\bH800\b",
        989,
        989,
        494,
        67,
        "NVIDIA H800 datasheet, 2023 (SXM): the H100's rates, NVLink 400 GB/s",
        {"h800-80gb": 79.1},
        _fields(3350, 200, 50, 50, units=132),
    ),
    DeviceSpec(
        r"\bH20$",
        148,
        148,
        74,
        44,
        "server makers' sheets, 2024; NVIDIA publishes none",
        {"h20-96gb": 95.2},
        _fields(4000, 450, 50, 50, units=78, matrix_share=0.961),
    ),
    # One superchip is one node: a Grace CPU with its memory behind NVLink-C2C, and a network port.
    DeviceSpec(
        r"\bGH200 (480|120)GB\b",
        989,
        989,
        494,
        67,
        "NVIDIA GH200 Grace Hopper Superchip datasheet, 2023 (HBM3)",
        {"gh200-96gb": 94.5},
        _fields(4000, 50, 50, 450, units=132, per_node=1, host_memory_gib=447),
    ),
    DeviceSpec(
        r"\bGH200\b", 989, 989, 494, 67, "NVIDIA GH200 Grace Hopper Superchip datasheet, 2023"
    ),
    # NVLink joins a rack. Two devices share each Grace CPU's NVLink-C2C (450 GB/s per direction).
    DeviceSpec(
        r"\bGB200\b",
        2500,
        2500,
        1250,
        80,
        "NVIDIA GB200 NVL72 datasheet, 2024, one of 72",
        {"gb200-186gb": 184.3},
        _fields(8000, 900, 50, 225, units=152, per_node=72, host_memory_gib=15_832),
    ),
    DeviceSpec(r"\bH200 NVL\b", 835, 835, 417, 60, "NVIDIA H200 datasheet, 2024"),
    DeviceSpec(
        r"\bH200\b",
        989,
        989,
        494,
        67,
        "NVIDIA H200 datasheet, 2024 (SXM)",
        {"h200-141gb": 139.8},
        _fields(4800, 450, 50, 50, units=132, channels=24, matrix_share=0.803),
    ),
    DeviceSpec(
        r"\bB200\b",
        2250,
        2250,
        1100,
        75,
        "NVIDIA HGX B200 datasheet, 2025, one of eight",
        {"b200-180gb": 178.3},
        _fields(8000, 900, 50, 50, units=148, channels=24, matrix_share=0.776),
    ),
    DeviceSpec(
        r"\bMI300X\b",
        1307.4,
        1307.4,
        653.7,
        163.4,
        "AMD Instinct MI300X datasheet, 2023",
        {"mi300x-192gb": 191.5},
        _fields(5300, 448, 50, 50, units=304, matrix_share=0.598, varlen=False),
    ),
    DeviceSpec(
        r"\bL40S\b",
        362,
        362,
        183,
        91.6,
        "NVIDIA L40S datasheet, 2023",
        {"l40s-48gb": 44.5},
        _fields(864, 32, 25, 25, units=142),
    ),
    DeviceSpec(
        r"\bRTX 4090$",
        165.2,
        165.2,
        82.6,
        82.6,
        "NVIDIA Ada GPU architecture whitepaper, 2022, appendix A",
        {"rtx4090-24gb": 23.6},
        _fields(1008, 32, 12.5, 25, units=128),
    ),
)
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
def runs_varlen(device: torch.device) -> bool:
    """Return whether torch's flash kernels for packed documents (`varlen_attn`) run on `device`.

    They need CUDA and compute capability 8.0. Whether AMD's kernels support sliding windows is
    unknown.
    """
    import torch

    return (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


@functools.cache
def multiplies_bf16() -> bool:
    """Return whether this machine's CPU has instructions for products of bf16 numbers."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
