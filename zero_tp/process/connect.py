"""Ranks connect: each takes its device and joins the process group, and together they make the topology's groups."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import resource
import shutil
import signal
import socket
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from zero_tp.config.optimizer import OFFLOADED, ON_DEVICE, builder_name
from zero_tp.errors import UserError
from zero_tp.files import this_machine
from zero_tp.parallel.fused import fuse
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.quiet import hushed
from zero_tp.topology import Topology, name_ranks

if TYPE_CHECKING:
    from zero_tp.config import RunConfig

TIMEOUT = timedelta(minutes=30)
OTHER_MACHINE_SECONDS = 15 * 60
AFTER_THE_WATCH_SECONDS = 30

# Parameters of mallopt(3), whose values are ints.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_TOP_PAD_BYTES = 2**28


def connect(
    environment: RankEnvironment,
    device_type: str,
    tensor: int = 1,
    sequence: bool = False,
    *,
    timeout: timedelta = TIMEOUT,
    join: Callable[[], None] | None = None,
) -> tuple[Topology, torch.device]:
    """Join the process group and make the topology's, after `environment.export`. Collective.

    Args:
        device_type: as torch names it: `cuda` or `cpu`.
        tensor, sequence: the TP degree, and whether SP is on.
        timeout: limit of one collective.
        join: makes the default process group; by default torch alone does, without DeepSpeed.

    Returns:
        The grid of ranks with this one's coordinates, and this rank's device, which is now the current one.

    Raises:
        UserError: this rank has no such device, nothing says which is its own, or another rank has the same.
    """
    allow_connections(environment.world)
    device = torch.device("cpu")
    if device_type != "cpu":
        device = own_device(environment, device_type)
        torch.get_device_module(device_type).set_device(device.index)
    if join is not None:
        join()
    else:
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timeout)
    if device_type != "cpu":
        store = dist.PrefixStore("zero_tp/devices", dist.distributed_c10d._get_default_store())
        refuse_shared(store, environment.rank, environment.world, identity(device), timeout)
    return Topology(tensor, sequence, timeout=timeout), device


def allow_connections(world: int) -> None:
    """Let this process hold the connections of a job of `world` ranks, as far as its hard limit of open files goes.

    The store has three with each rank, and gloo one between any two; the soft limit is often 1,024 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 4 * world
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def own_device(environment: RankEnvironment, device_type: str) -> torch.device:
    """Return the device of this rank: that of its number on its machine, or the only one that it is shown.

    Raises:
        UserError: it has none, or nothing says which.
    """
    index, count = environment.local_rank, torch.get_device_module(device_type).device_count()
    if index is None and environment.world > 1:
        raise UserError(
            f"nothing says which {device_type} device is rank {environment.rank}'s: start it by a launcher, or set "
            "LOCAL_RANK to its number on its machine"
        )
    if count == 1 and _shown_devices():  # srun --gpus-per-task=1 shows each rank its own
        return torch.device(device_type, 0)
    if (index or 0) >= count:
        raise UserError(f"local rank {index} has no {device_type} device: this machine has {count}")
    return torch.device(device_type, index or 0)


def _shown_devices() -> str:
    """Return what a launcher lets this rank see, as it says it."""
    from deepspeed.accelerator import get_accelerator

    return next((os.environ[name] for name in get_accelerator().visible_devices_envs() if os.environ.get(name)), "")


def identity(device: torch.device) -> str:
    """Return what tells a device from all others of the job."""
    uuid = getattr(torch.get_device_module(device.type).get_device_properties(device), "uuid", None)
    shown = [name for name in _shown_devices().split(",") if name]
    name = shown[device.index] if device.index < len(shown) else str(device.index)
    if uuid is None or name.startswith("MIG"):  # the slices of a device may all have its UUID
        return f"{device.type} device {name} of {this_machine()}"
    return f"{device.type} device {uuid} of {socket.gethostname()}"


def refuse_shared(store: dist.Store, rank: int, world: int, device: str, timeout: timedelta) -> None:
    """Check that no two ranks have the same device. Every rank calls it, and asks the store four times.

    Args:
        device: what tells it from all others.

    Raises:
        UserError: on every rank, naming two that share one.
    """
    other = int(store.compare_set(f"of/{hashlib.sha256(device.encode()).hexdigest()}", "", str(rank)))
    if other != rank:
        store.set("shared", f"{name_ranks(sorted((other, rank)))} share {device}")
    if store.add("looked", 1) == world:
        store.set("all", "")
    store.wait(["all"], timeout)
    if store.check(["shared"]):
        told = store.get("shared").decode()
        raise UserError(
            f"{told}; start no more ranks on a machine than it has devices, and let the launcher number them"
        )


def connect_deepspeed(config: RunConfig, environment: RankEnvironment, verbose: bool) -> tuple[Topology, torch.device]:
    """Check what the config needs of this machine, then `connect` on DeepSpeed's accelerator. Collective.

    Raises:
        UserError: see `connect`; the accelerator lacks the config's dtype, or the machine what NVMe offload or
            DeepSpeed's optimizer needs.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from zero_tp.config import check_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu" and config.zero_tp.training.keep_freed_memory:
        keep_freed_memory()
    if accelerator.device_name() == "cuda":
        order_launches(config.zero_tp.parallel.tensor, config.zero_stage)
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    check_accelerator(config.deepspeed_config(), lambda dtype: bool(supported[dtype]()))
    check_nvme(config.nvme_paths)
    without_shared_memory_collectives()
    # On one machine, what no process holds is abandoned; several may share the folder.
    clear_abandoned_locks(0.0 if environment.local_world == environment.world else OTHER_MACHINE_SECONDS)
    told = to_compile(config.deepspeed_config(), accelerator)
    if told is not None and environment.rank == 0:
        print(told, flush=True)
    # The watch knows more of a hang than the collective that ends by its limit, so that comes after.
    timeout = timedelta(minutes=config.zero_tp.training.timeouts.longest, seconds=AFTER_THE_WATCH_SECONDS)

    def join() -> None:
        with hushed(verbose):
            deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timeout, verbose=verbose)

    parallel = config.zero_tp.parallel
    topology, device = connect(
        environment, accelerator.device_name(), parallel.tensor, parallel.sequence, timeout=timeout, join=join
    )
    if parallel.fused_products:
        fuse(topology.tensor_group, device)
    return topology, device


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


def to_compile(config: dict[str, Any], accelerator: Any) -> str | None:
    """Return a line on what DeepSpeed will compile for a run; None where nothing is left to compile.

    Its own optimizers, such as those of offloaded states, are C++ that it builds when a machine first needs them: its
    CPU Adam took g++ 139 s of CPU time, on a machine that others used too.

    Args:
        config: DeepSpeed's, resolved. accelerator: DeepSpeed's.

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
    if missing := _missing_compiler(on_cuda=name in ON_DEVICE.values() and accelerator.device_name() == "cuda"):
        other = "leave offload_optimizer out" if name in OFFLOADED.values() else 'use AdamW with "torch_adam": true'
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
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


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


def order_launches(tensor: int, stage: int) -> None:
    """Let CUDA kernels begin in the order of their launches, before CUDA begins in this process.

    A layer starts its collective before the product that hides it; with several queues the product may take the whole
    device first. The gathers of ZeRO-3 are behind no product, and want queues of their own. What a person has set
    stays.

    Args:
        tensor: the TP degree.
        stage: of ZeRO.
    """
    if tensor > 1 and stage < 3:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def can_keep_freed_memory() -> bool:
    """Tell whether `keep_freed_memory` does anything here: it leaves what a person has set for glibc's allocator in the
    environment, and other C libraries have no such call."""
    told = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    return not told and hasattr(ctypes.CDLL(None), "mallopt")


def keep_freed_memory() -> None:
    """Keep freed memory in this process, where that can be.

    glibc maps every large block afresh and gives it back when it is freed, and a training step makes and frees the same
    blocks again: each time the system fills every page of them with zeros. Threads would have heaps of their own, of
    64 MiB, and map what is larger, as gloo's do for each reduction, so that all threads share one heap.
    """
    if can_keep_freed_memory():
        for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _TOP_PAD_BYTES), (_ARENA_MAX, 1)):
            ctypes.CDLL(None).mallopt(name, value)
