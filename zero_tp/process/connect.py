"""Ranks connect: each takes its device and joins the process group, and together they make the topology's groups."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zero_tp.errors import UserError
from zero_tp.parallel.fused import fuse
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.quiet import suppress_output
from zero_tp.topology import Topology
from zero_tp.zero import ops

if TYPE_CHECKING:
    from zero_tp.config import RunConfig

TIMEOUT = timedelta(minutes=30)
AFTER_THE_WATCH_SECONDS = 30


def connect(
    environment: RankEnvironment,
    device_type: str,
    tensor: int = 1,
    sequence: bool = False,
    *,
    timeout: timedelta = TIMEOUT,
    join: Callable[[torch.device], None] | None = None,
) -> tuple[Topology, torch.device]:
    """Join the process group and make the topology's, after `environment.export`. Collective.

    Args:
        device_type: as torch names it: `cuda` or `cpu`.
        tensor, sequence: the TP degree, and whether SP is on.
        timeout: limit of one collective.
        join: makes the default process group, given this rank's device; by default torch alone does.

    Returns:
        The grid of ranks with this one's coordinates, and this rank's device, which is now the current one.

    Raises:
        UserError: this rank has no such device, nothing says which is its own, or another rank has refused.
    """
    device = torch.device("cpu")
    if device_type != "cpu":
        device = own_device(environment, device_type)
        torch.get_device_module(device_type).set_device(device.index)
        export_device_index(device)
    if environment.world > 1:
        environment.store.wait_until_all_ready(timeout)
    if join is not None:
        join(device)
    else:
        bound = None if device_type == "cpu" else device  # so that NCCL splits groups from the world
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timeout, device_id=bound)
    return Topology(tensor, sequence, timeout=timeout), device


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
    """Return the launcher's list of devices for this rank; "" if there is none."""
    from deepspeed.accelerator import get_accelerator

    return next((os.environ[name] for name in get_accelerator().visible_devices_envs() if os.environ.get(name)), "")


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
    if accelerator.device_name() == "cuda" and config.zero_tp.training.guard_gradients:
        fix_workspace()
    check_accelerator(config.dtype, accelerator)
    ops.check_nvme(config.nvme_paths)
    ops.without_shared_memory_collectives()
    message = ops.to_compile(config.deepspeed_config(), accelerator)
    if message is not None and environment.rank == 0:
        print(message, flush=True)
    # The watchdog describes a hang better than a collective that reaches its limit, so it comes first.
    timeout = timedelta(minutes=config.zero_tp.training.timeouts.longest, seconds=AFTER_THE_WATCH_SECONDS)

    def join(device: torch.device) -> None:
        with suppress_output(verbose):
            deepspeed.init_distributed(accelerator.communication_backend_name(), timeout=timeout, verbose=verbose)

    parallel = config.zero_tp.parallel
    topology, device = connect(
        environment, accelerator.device_name(), parallel.tensor, parallel.sequence, timeout=timeout, join=join
    )
    if parallel.fused_products:
        fuse(topology, device)
    return topology, device


def export_device_index(device: torch.device) -> None:
    """Set LOCAL_RANK to the device's index, because DeepSpeed uses it as one.

    The two differ if the launcher shows each rank one device. RankEnvironment has read the launcher's number before.
    """
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):  # DeepSpeed asserts that both are equal
        if name in os.environ and device.index is not None:
            os.environ[name] = str(device.index)


def fix_workspace() -> None:
    """Make cuBLAS deterministic, as `guards.check_repeated` needs. Call it before CUDA begins in this process.

    torch reads the variable once, at the first product (`Context::alertCuBLASConfigNotDeterministic`).

    Raises:
        UserError: the environment has a value with which cuBLAS is not deterministic.
    """
    value = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if value not in (":4096:8", ":16:8"):
        raise UserError(
            f"CUBLAS_WORKSPACE_CONFIG is {value!r}, with which zero_tp.training.guard_gradients cannot compare; unset "
            "it, or set it to :4096:8"
        )
