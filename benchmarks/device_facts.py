"""Print a fact about this machine's device, as JSON: versions, attention or clocks.

python -m benchmarks.device_facts NAME
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from typing import Any

import torch

from benchmarks.dated import provenance
from benchmarks.device import LENGTH, ROWS
from zero_tp.base.versions import versions
from zero_tp.model.architectures import architecture_of
from zero_tp.model.attention_kernel import describe_attention

PACKAGES = ("torch", "triton", "deepspeed", "transformers", "accelerate", "numpy")
QUERY = (
    "name",
    "driver_version",
    "compute_mode",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "power.draw",
    "power.limit",
    "temperature.gpu",
    "memory.used",
    "memory.total",
)
REPEATS = 20


def device_versions() -> dict[str, Any]:
    """Return versions, with those of cuDNN and NCCL."""
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return provenance() | {"versions": versions(PACKAGES), "cudnn": cudnn, "nccl": nccl}


def attention(device: torch.device) -> list[str]:
    """Return the lines that a run of the first row prints."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(**ROWS["1.3b"].model)
    spec = architecture_of(config).spec(config)
    return [*describe_attention(spec, device, torch.bfloat16, LENGTH, 1, documents=False)]


def seconds_of(device: torch.device, run: Any, repeats: int) -> float:
    """Return the mean seconds of a call, after three."""
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def clocks(device: torch.device) -> dict[str, Any]:
    """Return the rates of a large product and of a copy, and nvidia-smi's figures after them."""
    size = 8192 if device.type == "cuda" else 256
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    source = torch.empty(2**31 if device.type == "cuda" else 2**20, dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    product = seconds_of(device, lambda: matrix @ matrix, REPEATS)
    copy = seconds_of(device, lambda: target.copy_(source), REPEATS)
    figures: dict[str, Any] = {
        "product_tflops": 2 * size**3 / product / 1e12,
        "copy_tbps": 2 * source.nbytes / copy / 1e12,
    }
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"]
        line = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        values = (value.strip() for value in line.splitlines()[0].split(","))
        figures |= dict(zip(QUERY, values, strict=True))
    return figures


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = {"attention": attention(device), "clocks": clocks(device)}
    print(json.dumps(device_versions() | lines))


if __name__ == "__main__":
    main()
