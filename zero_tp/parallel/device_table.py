"""A table of devices: matrix rates, memory and links.

Rates are datasheet peaks for dense matrices with fp32 accumulation (half of a figure that includes
2:4 sparsity). Memory is torch's `total_memory`, which is less than the name says. Links are per
device and direction; links between nodes depend on the cluster, and the table assumes one network
port per device. For a device without memory and links in the table, runs report an MFU, but
`zero-tp plan` can't plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple


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
# and 77). H200: a large bf16 product (714 TFLOP/s) and a copy (4.27 TB/s), measured in November
# 2026. `channels`: NCCL's own log ("24 coll channels"), one multiprocessor each
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
        _fields(4800, 450, 50, 50, units=132, channels=24, matrix_share=0.722, memory_share=0.89),
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
