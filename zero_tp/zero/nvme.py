"""What ZeRO's offload to NVMe needs of a machine, found out before DeepSpeed stops in the middle of a build."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zero_tp.errors import UserError


def check_nvme(paths: Mapping[str, Path], has_libaio: Callable[[], bool] | None = None) -> None:
    """Check that this machine can offload to these directories.

    Args:
        paths: the directory of each offload block of the config whose device is "nvme", by the block's name.
        has_libaio: whether DeepSpeed's asynchronous I/O can be built here; by default it is tried, which compiles a
            few lines.

    Raises:
        UserError: `nvme_path` is not a directory that can be written, or libaio is missing.
    """
    for name, path in paths.items():
        key = f"zero_optimization.{name}"
        if not path.is_dir():
            raise UserError(f"{key}.nvme_path: {path} is not a directory on this machine; create it, or name another")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{key}.nvme_path: {path} cannot be written; change its permissions, or name another")
        if not (has_libaio or _has_libaio)():
            raise UserError(
                f'{key}.device: "nvme" needs libaio with its headers, which were not found; install libaio-dev '
                '(Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or use "cpu"'
            )


def _has_libaio() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible())
