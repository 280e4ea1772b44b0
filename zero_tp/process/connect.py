"""Ranks connect: each takes its device and joins the process group, and together they make the topology's groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zero_tp.errors import UserError
from zero_tp.parallel.fused import enable_fused_products
from zero_tp.process.environment import RankEnvironment
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
) -> tuple[Topology, torch.device]:
    """Join the process group, which DeepSpeed takes over, and make the topology's. Collective.

    Call it after `environment.export`.

    Args:
        device_type: as torch names it: `cuda` or `cpu`.
        tensor, sequence: the TP degree, and whether SP is on.
        timeout: limit of one collective.

    Returns:
        The grid of ranks with this one's coordinates, and this rank's device, which is now the current one.

    Raises:
        UserError: this rank has no such device, nothing says which is its own, or another rank has refused.
    """
    device, several = torch.device("cpu"), environment.world > 1
    if device_type != "cpu":
        device = own_device(environment, device_type)
        torch.get_device_module(device_type).set_device(device.index)
        for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if name in os.environ:  # which DeepSpeed takes for the device's index; RankEnvironment has read it before
                os.environ[name] = str(device.index)
    if several:
        environment.store.wait_until_all_ready(timeout)
    bound = device if several and device_type != "cpu" else None  # so that NCCL splits groups from the world
    dist.init_process_group(dist.get_default_backend_for_device(device), timeout=timeout, device_id=bound)
    return Topology(tensor, sequence, timeout=timeout), device


def own_device(environment: RankEnvironment, device_type: str) -> torch.device:
    """Return the device of this rank: that of its number on its machine, or the only one that it is shown.

    Raises:
        UserError: it has none, or nothing says which.
    """
    from deepspeed.accelerator import get_accelerator

    index, count = environment.local_rank, torch.get_device_module(device_type).device_count()
    if index is None and environment.world > 1:
        raise UserError(
            f"nothing says which {device_type} device is rank {environment.rank}'s: start it by a launcher, or set "
            "LOCAL_RANK to its number on its machine"
        )
    if count == 1 and any(os.environ.get(name) for name in get_accelerator().visible_devices_envs()):
        return torch.device(device_type, 0)  # srun --gpus-per-task=1 shows each rank its own
    if (index or 0) >= count:
        raise UserError(f"local rank {index} has no {device_type} device: this machine has {count}")
    return torch.device(device_type, index or 0)


def connect_deepspeed(config: RunConfig, environment: RankEnvironment) -> tuple[Topology, torch.device]:
    """Check what the config needs of this machine, then `connect` on DeepSpeed's accelerator. Collective.

    Raises:
        UserError: see `connect`; the accelerator lacks the config's dtype, or the machine what NVMe offload or
            DeepSpeed's optimizer needs.
    """
    from deepspeed.accelerator import get_accelerator

    from zero_tp.config import check_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda" and config.zero_tp.training.guard_gradients:
        fix_workspace()
    check_accelerator(config.dtype, accelerator)
    ops.check_nvme(config.nvme_paths)
    ops.without_shared_memory_collectives()
    message = ops.compilation_note(config.deepspeed_config(), accelerator)
    if message is not None and environment.rank == 0:
        print(message, flush=True)
    # The watchdog describes a hang better than a collective that reaches its limit, so it comes first.
    timeout = timedelta(minutes=config.zero_tp.training.timeouts.longest, seconds=AFTER_THE_WATCH_SECONDS)
    parallel = config.zero_tp.parallel
    device_type = accelerator.device_name()
    topology, device = connect(environment, device_type, parallel.tensor, parallel.sequence, timeout=timeout)
    if parallel.fused_products:
        enable_fused_products(topology, device)
    return topology, device


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
