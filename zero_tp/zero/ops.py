"""What DeepSpeed has to compile for a run is said before it does, and what it can't compile is one line.

An Adam that says nothing of its code is torch's, and needs no compiler (config/optimizer.py). DeepSpeed's own
optimizers, such as those of offloaded states, are C++ that it builds when a run first needs them on a machine.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

from zero_tp.errors import UserError

OFFLOADED = {"adam": "CPUAdamBuilder", "adagrad": "CPUAdagradBuilder", "lion": "CPULionBuilder"}
ON_DEVICE = {"adam": "FusedAdamBuilder", "lion": "FusedLionBuilder"}
"""DeepSpeed's builder for each optimizer (`DeepSpeedEngine._configure_basic_optimizer`); for others torch has it."""
MINUTES = "one to three minutes"


def builder_name(config: dict[str, Any]) -> str | None:
    """Return the builder of the op that the optimizer of DeepSpeed's config needs; None where torch has it."""
    optimizer = config["optimizer"]
    if optimizer.get("params", {}).get("torch_adam"):
        return None
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    table = ON_DEVICE if offload.get("device", "none") == "none" else OFFLOADED
    return table.get(optimizer["type"].lower().removesuffix("w"))


def announced(config: dict[str, Any], accelerator: Any) -> str | None:
    """Return a line on what DeepSpeed will compile for a run; None where nothing is left to compile.

    Raises:
        UserError: DeepSpeed has no such op for this accelerator, or what compiles it is missing.
    """
    name = builder_name(config)
    if name is None:
        return None
    builder = accelerator.create_op_builder(name)
    kind = config["optimizer"]["type"]
    if builder is None or type(builder).__name__ == "NotImplementedBuilder":
        device = accelerator.device_name()
        raise UserError(f"optimizer.type: DeepSpeed has no {kind} for {device} devices; use AdamW, which torch has")
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(builder.name):
        return None
    if missing := _missing(on_cuda=name in ON_DEVICE.values() and accelerator.device_name() == "cuda"):
        other = "leave offload_optimizer out" if name in OFFLOADED.values() else 'leave "torch_adam" out'
        raise UserError(
            f"optimizer.type: {kind} needs DeepSpeed's {builder.name}, which is compiled, but there is no {missing}; "
            f"install it, or {other}"
        )
    if _built(builder.name).exists():
        return None
    return f"compiling DeepSpeed's {builder.name} for this machine, {MINUTES}, once"


def _missing(on_cuda: bool) -> str | None:
    """Return what a compiler lacks here, in words."""
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"C++ compiler ({compiler}; Debian, Ubuntu: g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Debian, Ubuntu: python3-dev)"
    if on_cuda and cpp_extension.CUDA_HOME is None:
        return "CUDA toolkit (nvcc)"
    if not cpp_extension.is_ninja_available():
        return "ninja on PATH (it is in the environment's bin)"
    return None


def _built(name: str) -> Path:
    """Return the library that torch makes of an extension."""
    from torch.utils import cpp_extension

    return Path(cpp_extension._get_build_directory(name, verbose=False), f"{name}.so")
