"""The side of a pool that runs on a rank: it calls functions, and restores the process after
each.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import importlib
import io
import os
import pkgutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import psutil
import torch

from zero_tp.run.process.node import die_with

T = TypeVar("T")

# DeepSpeed keeps the mpu, groups, contexts and activation checkpointing's settings in the globals
# of these modules. All plain values in them are restored, so that a global which a new version adds
# is too.
DEEPSPEED_MODULES = (
    "deepspeed.comm.comm",
    "deepspeed.utils.groups",
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.parameter_offload",
)

_cache: dict[Hashable, Any] = {}
_cached_groups: set[Any] = set()


def pack(value: Any) -> bytes:
    # torch.save copies tensors into the bytes; torch's own pickling for processes passes
    # descriptors of shared memory.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def cached(key: Hashable, factory: Callable[[], T]) -> T:
    """On a rank: what `factory()` returned the first time, kept until the pool ends, with the
    process groups it made.

    For what is costly and never changed: a topology, a reference model (no engine: those are
    destroyed after each run). Every rank has to ask for it in the same run, as for anything that
    makes process groups.
    """
    if key not in _cache:
        before = set(_groups())
        _cache[key] = factory()
        _cached_groups.update(set(_groups()) - before)
    return _cache[key]


def rank_main(
    connection: Connection, rank: int, world: int, environment: dict[str, str], output: str
) -> None:
    """Join the group, then call the functions that arrive until the connection closes.

    Each function has two replies: its result, then "ready" once the process is restored; or one, an
    error.
    """
    # The fork server, which ends when pytest does, however that happens.
    die_with(psutil.Process(os.getppid()))
    # Ctrl-C reaches the whole group; pytest ends the ranks itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    _join_group(rank, world)
    state = _State()
    while True:
        try:
            name, arguments, options = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        failed = False
        try:
            os.ftruncate(1, 0)  # a failure shows what its own function has printed
            reply = pack(("result", pkgutil.resolve_name(name)(*arguments, **options)))
            arguments = options = None
            connection.send_bytes(reply)
            state.restore()
            reply = pack(("ready",))
        except BaseException as error:
            arguments = options = None
            reply = pack(
                (
                    "error",
                    time.monotonic(),
                    type(error).__name__,
                    str(error),
                    traceback.format_exc(),
                )
            )
            failed = True
        connection.send_bytes(reply)
        if failed:
            state.restore()


def _join_group(rank: int, world: int) -> None:
    import logging

    import deepspeed

    from zero_tp.engine.zero.ops import disable_shared_memory_collectives

    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives that torch 2.13 calls deprecated, which would fill the output of
    # every failure.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(address, port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    disable_shared_memory_collectives()
    # Finds the group and puts deepspeed.comm on it.
    deepspeed.init_distributed("gloo", verbose=False)


class _State:
    """The plain values that a function may change in the process, as they are at the start."""

    def __init__(self) -> None:
        from deepspeed.comm import comm
        from deepspeed.runtime.activation_checkpointing import checkpointing

        self.folder = os.getcwd()
        self.values: list[tuple[dict[str, Any], str, Any]] = []
        self.containers: list[tuple[Any, Any]] = [
            (os.environ, dict(os.environ)),
            (sys.path, list(sys.path)),
        ]
        objects = (comm.timers, comm.comms_logger, checkpointing.get_cuda_rng_tracker())
        modules = map(importlib.import_module, DEEPSPEED_MODULES)
        for namespace in [vars(each) for each in (*modules, *objects)]:
            for key, value in namespace.items():
                if isinstance(value, list | dict | set) and not key.startswith("__"):
                    self.containers.append((value, copy.copy(value)))
                if value is None or isinstance(value, bool | int | float | str | list | dict | set):
                    self.values.append((namespace, key, value))
        self.restore()

    def restore(self) -> None:
        """Restore the values, destroy engines and process groups, seed all generators;
        collective.
        """
        from transformers import set_seed

        for namespace, key, value in self.values:
            namespace[key] = value
        for (
            container,
            saved,
        ) in self.containers:  # in place: other modules hold the same list or dictionary
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(saved)
        os.chdir(self.folder)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        set_seed(0)
        _destroy_engines()
        gc.collect()
        gc.freeze()  # what is left stays: the next collection need not look at it
        for group in _groups():
            if group not in _cached_groups:
                torch.distributed.destroy_process_group(group)
        # every rank has left its groups before the next function makes new ones
        torch.distributed.barrier()


def _destroy_engines() -> None:
    """Destroy every DeepSpeed engine and empty what its hooks hold.

    An engine hangs on its parameters through autograd hooks, a cycle that the collector can't see:
    it would stay with its groups' threads (measured: 3 threads and 5 descriptors an engine). Under
    ZeRO-3 destroy() leaves hooks.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    # By their own type: `isinstance` would ask what a weak proxy stands for, which may be gone
    # (torch's compiler has some).
    for engine in [each for each in gc.get_objects() if issubclass(type(each), DeepSpeedEngine)]:
        if vars(engine).get("_modules") is None:
            continue  # emptied before, but a hook still has the shell
        engine.destroy()
        optimizer = getattr(engine, "optimizer", None)
        for holder in (optimizer, getattr(optimizer, "parameter_offload", None), engine):
            if holder is not None:
                vars(holder).clear()


def _groups() -> list[Any]:
    """The process groups of this process but for the world."""
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed import distributed_c10d

    return [
        group
        for group in distributed_c10d._world.pg_map
        if group is not torch.distributed.group.WORLD
    ]
