"""DeepSpeed compiles some of its ops on the machine that first needs them: what that takes is checked and said before,
and no killed build stands in its way.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import sysconfig
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from zero_tp.config.optimizer import FUSED_ADAM, builder_name
from zero_tp.errors import UserError

OTHER_MACHINE_SECONDS = 15 * 60


def check_nvme(paths: Mapping[str, Path]) -> None:
    """Check that this machine can offload to these directories.

    Args:
        paths: the directory of each offload block of the config whose device is "nvme", by the block's name.

    Raises:
        UserError: `nvme_path` is not a directory that can be written, or libaio is missing.
    """
    for name, path in paths.items():
        key = f"zero_optimization.{name}"
        if not path.is_dir():
            raise UserError(f"{key}.nvme_path: {path} is not a directory on this machine; create it, or name another")
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(f"{key}.nvme_path: {path} cannot be written; change its permissions, or name another")
        if not has_libaio():
            raise UserError(
                f'{key}.device: "nvme" needs libaio with its headers, which were not found; install libaio-dev '
                '(Debian, Ubuntu) or libaio-devel (Fedora, RHEL), or use "cpu"'
            )


def has_libaio() -> bool:
    """Tell whether DeepSpeed's asynchronous I/O can be built here: it compiles a few lines."""
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible())


def to_compile(config: dict[str, Any], accelerator: Any) -> str | None:
    """Return a line on what DeepSpeed will compile for a run; None where nothing is left to compile.

    Its own optimizers, such as those of offloaded states, are C++ that it builds when a machine first needs them: its
    CPU Adam took g++ 139 s of CPU time, on a machine that others used too.

    Args:
        config: DeepSpeed's, resolved. accelerator: DeepSpeed's.

    Raises:
        UserError: what compiles it is missing.
    """
    name = builder_name(config)
    if name is None:
        return None
    builder = accelerator.create_op_builder(name)
    kind = config["optimizer"]["type"]
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get(builder.name):
        return None
    if missing := _missing_compiler(on_cuda=name == FUSED_ADAM and accelerator.device_name() == "cuda"):
        other = 'use AdamW with "torch_adam": true' if name == FUSED_ADAM else "leave offload_optimizer out"
        raise UserError(
            f"optimizer.type: {kind} needs DeepSpeed's {builder.name}, which is compiled, but there is no {missing}; "
            f"install it, or {other}"
        )
    if _built(builder.name).exists():
        return None
    return f"compiling DeepSpeed's {builder.name} for this machine, once, which takes minutes"


def _missing_compiler(on_cuda: bool) -> str | None:
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


def without_shared_memory_collectives() -> None:
    """Keep `deepspeed.init_distributed` from compiling and loading its shared-memory collectives.

    Only its inference uses them, and loading them takes a lock file for a moment on every rank at every start: a rank
    killed in that moment would leave all later starts waiting for ever.

    DeepSpeed fills the table of what works here when it is first read: it starts compilers for every op and prints what
    each lacks. `init_distributed` alone reads it, so it gets one with this entry only.
    """
    import deepspeed

    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False


def clear_abandoned_locks(seconds: float) -> None:
    """Remove what killed builds have left in torch's extension folder; see `abandoned_locks`."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in abandoned_locks(root, seconds):
        lock.unlink(missing_ok=True)


def abandoned_locks(root: Path, seconds: float = OTHER_MACHINE_SECONDS) -> Iterator[Path]:
    """Yield the lock files of torch's extension builds below `root` that nobody holds.

    torch waits for such a file for ever. A builder keeps it open, so one that no process of this machine has open was
    left by a killed one; where the folder is shared, another machine may hold it, and a build there takes no `seconds`.
    """
    locks = list(root.glob("*/*/lock")) + list(root.glob("*/lock"))
    seen: set[str] | None = None
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):  # all ranks start by looking; another one has removed it
            held = _is_open(lock)
            if held is None:
                seen = _open_files() if seen is None else seen
                held = str(lock.resolve()) in seen
            if not held and time.time() - lock.stat().st_mtime > seconds:
                yield lock


def _is_open(path: Path) -> bool | None:
    """Tell whether a process of this machine has a file open, also one of another container; None: nobody can tell.

    The kernel grants a lease for writing on a file that nobody else has open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:  # another person's, or a link
        return True if error.errno == errno.EAGAIN else None  # another rank asks the same now
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored: SIGIO would end this process
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:  # others: a file system without leases, such as NFS
        return True if error.errno == errno.EAGAIN else None
    finally:
        os.close(descriptor)
    return False


def _open_files() -> set[str]:
    """Return the files that processes of this machine hold open, as far as this user may look."""
    held: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended, or it is another user's
            held.update(file.path for file in process.open_files())
    return held
