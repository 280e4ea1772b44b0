"""Engines that are made around a model by someone else."""

from __future__ import annotations

from typing import Any

from zero_tp.errors import UserError
from zero_tp.topology import Topology


def refuse_engine_without_topology(hook: Any, topology: Topology) -> None:
    """DeepSpeed's engine registers a forward hook on the module that it is made around; see whose it is.

    `Accelerator.prepare` and `Trainer` call `deepspeed.initialize` without an mpu. Its data-parallel group is then the
    whole world, and it averages the gradients of different tensor parallel shards, without an error.

    Raises:
        UserError: the hook is that of an engine which knows another topology than the model, and the model is split.
    """
    free = getattr(getattr(hook, "__code__", None), "co_freevars", ())
    held = dict(zip(free, getattr(hook, "__closure__", None) or (), strict=False))
    engine = held["self"].cell_contents if "self" in held else None
    if topology.tensor == 1 or not type(engine).__module__.startswith("deepspeed."):
        return
    if getattr(engine, "mpu", None) is not topology:
        raise _refusal(topology, "a DeepSpeed engine that does not know its topology")


def refuse_data_parallel_wrapper(topology: Topology) -> None:
    """torch's DistributedDataParallel averages gradients over the whole world, unless it is told otherwise.

    Raises:
        UserError: the model is split.
    """
    if topology.tensor > 1:
        raise _refusal(topology, "torch's DistributedDataParallel, which does not know its topology")


def _refusal(topology: Topology, where: str) -> UserError:
    return UserError(
        f"a model of tensor parallel size {topology.tensor} in {where}, as Accelerator.prepare and Trainer make it, "
        "would average the gradients of different shards; train it with launch/pretrain.py, call "
        "deepspeed.initialize(mpu=topology), or use tensor parallel size 1"
    )
