"""Engines that others build around a split model without knowing its topology are refused."""

from __future__ import annotations

from typing import Any

from zero_tp.errors import UserError
from zero_tp.topology import Topology


def refuse_engine_without_topology(hook: Any, topology: Topology) -> None:
    """Refuse the forward hook of a DeepSpeed engine that knows another topology than the model.

    DeepSpeed's engine registers a hook on the module that it is made around. `Accelerator.prepare` and `Trainer` call
    `deepspeed.initialize` without an mpu. Its data-parallel group is then the whole world, and it averages the
    gradients of different tensor parallel shards, without an error.

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
    """Refuse torch's DistributedDataParallel, which averages gradients over the whole world.

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
