"""Check what DeepSpeed's compiled ops need of a machine before a run uses them."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import DeepSpeedSettings
from zero_tp.base.settings.optimizer import Adam


def check_nvme(paths: Mapping[str, Path | None]) -> None:
    """Check that this machine can offload to these directories.

    Args:
        paths: the directory of each offload block of the config whose device is "nvme", by the
            block's name.
    """
    for name, path in paths.items():
        key = f"zero_optimization.{name}"
        assert path is not None, "a rule refuses it"
        if not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            problem = f"{path} is not a directory on this machine that can be written"
            raise UserError(
                f"{key}.nvme_path: {problem}; create it, change its permissions, or name another"
            )
        if not has_libaio():
            raise UserError(
                f'{key}.device: "nvme" needs libaio with its headers, which were not found; '
                "install libaio-dev "
                '(Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or use "cpu"'
            )


def has_libaio() -> bool:
    """Return whether DeepSpeed can build its asynchronous I/O here, by compiling a few lines."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible())


FUSED_ADAM = "FusedAdamBuilder"


def builder_name(settings: DeepSpeedSettings) -> str | None:
    """Return DeepSpeed's op builder of the optimizer; None for torch's own."""
    optimizer = settings.optimizer
    if optimizer is None or not isinstance(optimizer.params, Adam) or optimizer.uses_torch_adam:
        return None
    offloaded = settings.zero_optimization.optimizer_device != "none"
    # DeepSpeed takes FusedAdam wherever `torch_adam` is not set, on a CPU too.
    return "CPUAdamBuilder" if offloaded else FUSED_ADAM


def compilation_note(settings: DeepSpeedSettings, accelerator: Any) -> str | None:
    """Return a log line about the op that DeepSpeed will compile for a run.

    None if it is built already or not needed.

    DeepSpeed's own optimizers, such as CPU Adam for offloaded states, are built when a machine
    first needs them, which takes g++ more than two minutes.

    Args:
        accelerator: DeepSpeed's.

    Raises:
        UserError: a part of a compiler is missing.
    """
    name = builder_name(settings)
    if name is None or settings.optimizer is None:
        return None
    builder = accelerator.create_op_builder(name)
    kind = settings.optimizer.type
    from deepspeed.git_version_info import installed_ops

    # Installed with DeepSpeed (DS_BUILD_OPS): nothing is compiled at run time.
    if installed_ops.get(builder.name):
        return None
    if missing := _missing_compiler(
        on_cuda=name == FUSED_ADAM and accelerator.device_name() == "cuda"
    ):
        other = (
            'use AdamW with "torch_adam": true'
            if name == FUSED_ADAM
            else "leave offload_optimizer out"
        )
        raise UserError(
            f"optimizer.type: {kind} needs DeepSpeed's {builder.name}, which is compiled, but "
            f"there is no {missing}; "
            f"install it, or {other}"
        )
    from torch.utils import cpp_extension

    if Path(
        cpp_extension._get_build_directory(builder.name, verbose=False), f"{builder.name}.so"
    ).exists():
        return None
    return f"compiling DeepSpeed's {builder.name} for this machine, once, which takes minutes"


def _missing_compiler(on_cuda: bool) -> str | None:
    """Return a description of the first missing part of a compiler."""
    from torch.utils import cpp_extension

    compiler = os.environ.get("CXX", "c++")
    try:
        words = shlex.split(compiler)  # "ccache g++" has two
    except ValueError:  # an unclosed quotation mark
        words = []
    if not words or shutil.which(words[0]) is None:
        return f"C++ compiler ({compiler}; Debian, Ubuntu: g++)"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "Python.h (Debian, Ubuntu: python3-dev)"
    if on_cuda and cpp_extension.CUDA_HOME is None:
        return "CUDA toolkit (nvcc)"
    if not cpp_extension.is_ninja_available():
        return "ninja on PATH (it is in the environment's bin)"
    return None


def disable_shared_memory_collectives() -> None:
    """Keep `deepspeed.init_distributed` from compiling its shared-memory collectives, which only
    inference uses.

    It reads DeepSpeed's table of compatible ops. Filling the whole table would start a compiler for
    every op, so the table gets this entry only.
    """
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
