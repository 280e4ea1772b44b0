"""Connect a rank: choose its device, join the process group and create the topology's groups."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zero_tp.base.errors import ConfigError, UserError, show
from zero_tp.engine.zero import ops
from zero_tp.engine.zero.build_lock import report_build_locks
from zero_tp.engine.zero.facts import fills_buckets
from zero_tp.parallel.cpu.heap import keep_freed_memory, let_return_freed_memory
from zero_tp.parallel.topology import Topology
from zero_tp.run.process.environment import RankEnvironment

if TYPE_CHECKING:
    from zero_tp.run.config import RunConfig

TIMEOUT = timedelta(minutes=30)
START_TIMEOUT = timedelta(days=7)
"""The first start of a run reads all of its corpora, on one rank of each machine."""
WATCHDOG_MARGIN_SECONDS = 30
"""A collective times out that much later than the watchdog, whose report says more."""


def connect(
    environment: RankEnvironment | None = None,
    device_type: str | None = None,
    tensor: int = 1,
    sequence: bool = False,
    *,
    expert: int = 1,
    timeout: timedelta = TIMEOUT,
    start_timeout: timedelta = TIMEOUT,
) -> tuple[Topology, torch.device]:
    """Join the process group, and create the topology's groups. Collective.

    DeepSpeed later adopts the process group.

    A script calls `zero_tp.connect(tensor=2)`: the ranks are those that a launcher started, or this
    process alone.

    Args:
        environment: this rank's place in its job, already exported; by default the launcher's
            variables give it.
        device_type: torch's name of it, `cuda` or `cpu`; by default that of DeepSpeed's
            accelerator.
        tensor, sequence, expert: the TP degree, whether SP is on, and the EP degree.
        timeout: limit of one collective.
        start_timeout: limit of the wait for ranks that still read their inputs.

    Returns:
        The topology of this rank, and its device, which is now the current one.

    Raises:
        UserError: the launcher's variables are incomplete, this rank has no such device, the TP
            degree does not divide the number of ranks or the EP degree that of replicas, or another
            rank has refused.
    """
    if environment is None:
        environment = RankEnvironment.of_this_process()
        environment.export()
    if device_type is None:
        from deepspeed.accelerator import get_accelerator

        device_type = str(get_accelerator().device_name())
    if environment.world > 1 and "OMP_NUM_THREADS" not in os.environ:
        # By default each rank would start a thread for each core.
        torch.set_num_threads(environment.cores)
    device = torch.device("cpu")
    bound_device = None
    if device_type != "cpu":
        device = rank_device(environment, device_type)
        # Before the first collective: under NCCL, those of objects go through the current device.
        torch.get_device_module(device_type).set_device(device.index)
        for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
            if name in os.environ:  # DeepSpeed takes it for the device's index
                os.environ[name] = str(device.index)
    if environment.world > 1:
        # Here ranks wait for one that still reads its corpora. In `init_process_group` they would
        # wait with the limit of a collective, and would not hear of a refusal.
        environment.store.wait_until_all_ready(start_timeout)
        if device_type != "cpu":
            bound_device = device  # NCCL then creates groups by splitting the world's communicator
    dist.init_process_group(
        dist.get_default_backend_for_device(device), timeout=timeout, device_id=bound_device
    )
    return Topology(tensor, sequence, expert=expert, timeout=timeout), device


def rank_device(environment: RankEnvironment, device_type: str) -> torch.device:
    """Return this rank's device.

    It is the one with its local rank's index, or the only one that it can see.
    """
    from deepspeed.accelerator import get_accelerator

    index = environment.local_rank
    count = torch.get_device_module(device_type).device_count()
    if index is None and environment.world > 1:
        raise UserError(
            f"LOCAL_RANK is not set, so the {device_type} device of rank {environment.rank} is "
            "unknown; use a "
            "launcher, or set it to the rank's number on its machine"
        )
    if count == 1 and any(
        os.environ.get(name) for name in get_accelerator().visible_devices_envs()
    ):
        # Srun --gpus-per-task=1 hides the devices of the other ranks.
        return torch.device(device_type, 0)
    if (index or 0) >= count:
        raise UserError(f"local rank {index} has no {device_type} device: this machine has {count}")
    return torch.device(device_type, index or 0)


def connect_deepspeed(
    config: RunConfig, environment: RankEnvironment
) -> tuple[Topology, torch.device]:
    """Check this machine, then `connect` on DeepSpeed's accelerator. Collective.

    The machine must have what the config uses.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    device_type = accelerator.device_name()
    if device_type == "cuda" and config.zero_tp.training.guard_gradients:
        # Before anything else uses CUDA, because torch reads the variable once.
        use_deterministic_cublas()
    check_accelerator(config.dtype, accelerator)
    ops.check_nvme(config.nvme_paths)
    ops.disable_shared_memory_collectives()
    # A killed build leaves a lock file, for which every later build waits without a word.
    report_build_locks()
    message = ops.compilation_note(config.settings, accelerator)
    if message is not None and environment.rank == 0:
        show(message)
    if device_type == "cpu":
        _set_heap(config)
    limits = config.zero_tp.training.timeouts
    margin = timedelta(seconds=WATCHDOG_MARGIN_SECONDS)
    parallel = config.zero_tp.parallel
    return connect(
        environment,
        device_type,
        parallel.tensor,
        parallel.sequence,
        expert=parallel.expert,
        timeout=timedelta(minutes=limits.longest) + margin,
        start_timeout=START_TIMEOUT
        if limits.start is None
        else timedelta(minutes=limits.start) + margin,
    )


def _set_heap(config: RunConfig) -> None:
    """Let this process's heap do as `keep_freed_memory` says, before large tensors are made."""
    setting = config.zero_tp.training.keep_freed_memory
    # Buckets, their flat copies and the parts of gradients have many sizes, so few fit where
    # another was (benchmarks/tried.md).
    buckets = fills_buckets(config.settings, config.data_parallel)
    # A step in 16 bits is shorter, and fresh pages take as long: a sixth of it. Those of large
    # blocks alone take little, but at stage 3, where each gathered layer has such blocks.
    if setting == "auto" and (buckets or config.dtype == "fp32"):
        let_return_freed_memory()
    if setting is True or (setting == "auto" and not buckets):
        stage = config.settings.zero_optimization.stage
        keep_freed_memory(large=setting is True or config.dtype == "fp32" or stage == 3)


def check_accelerator(dtype: str, accelerator: Any) -> None:
    """Check that this machine's accelerator supports a dtype.

    The accelerator is DeepSpeed's object; the dtype is "fp32", "bf16" or "fp16".
    """
    supported = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if dtype != "fp32" and not supported[dtype]():
        others = " or ".join(other for other in supported if other != dtype and supported[other]())
        problem = (
            f"the accelerator of this machine ({accelerator.device_name()}) does not support "
            f"{dtype}"
        )
        raise ConfigError(
            f"{dtype}.enabled", problem, f"use {others or 'fp32'}, or a machine that supports it"
        )


def use_deterministic_cublas() -> None:
    """Make cuBLAS deterministic, as `guards.check_reproducible` requires.

    Call it before this process uses CUDA.

    torch reads the variable at its first product (`Context::alertCuBLASConfigNotDeterministic`).
    """
    value = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if value not in (":4096:8", ":16:8"):
        raise UserError(
            f"CUBLAS_WORKSPACE_CONFIG is {value!r}, with which zero_tp.training.guard_gradients "
            "cannot compare "
            "gradients: cuBLAS is not deterministic; unset it, or set it to :4096:8"
        )
