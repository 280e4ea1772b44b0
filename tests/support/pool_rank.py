"""The side of a pool that runs on a rank: it serves functions, and puts the process back as it was after each."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def pack(value: Any) -> bytes:
    # torch.save copies tensors into the bytes; torch's own pickling for processes passes descriptors of shared memory.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


_cache: dict[Hashable, Any] = {}
_kept_groups: set[Any] = set()


def cached(key: Hashable, factory: Callable[[], T]) -> T:
    """On a rank: what `factory()` returned the first time, kept until the pool ends, with the process groups it made.

    For what is costly and never changed: a topology, a reference model (no engine: those are destroyed after each run).
    Every rank has to ask for it in the same run, as for anything that makes process groups.
    """
    if key not in _cache:
        before = set(_groups())
        _cache[key] = factory()
        _kept_groups.update(set(_groups()) - before)
    return _cache[key]


def rank_main(
    connection: Connection, rank: int, world: int, environment: dict[str, str], files: tuple[str, str]
) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; pytest ends the ranks itself
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(files[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    with open(files[1], "w") as stack:
        faulthandler.enable(sys.stderr)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        _serve(connection, rank, world)


def _serve(connection: Connection, rank: int, world: int) -> None:
    import logging

    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives that torch 2.13 calls deprecated, which would fill the output of every failure.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    import deepspeed

    from zero_tp.zero.ops import without_shared_memory_collectives

    store = torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    without_shared_memory_collectives()
    deepspeed.init_distributed("gloo", verbose=False)  # finds the group and puts deepspeed.comm on it
    state = _State()
    gc.collect()
    gc.freeze()  # each later collection looks at the tests' objects only
    while True:
        try:
            order = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        reply: tuple[Any, ...]
        try:
            if order[0] == "reset":
                state.restore()
                torch.distributed.barrier()  # every rank has left its groups before the next function makes new ones
                reply = ("done",)
            else:
                _, name, args, kwargs = order
                os.ftruncate(1, 0)  # what is shown after a failure is this function's own
                _seed()
                reply = ("result", _resolve(name)(*args, **kwargs))
            packed = pack(reply)
        except BaseException as error:
            packed = pack(("error", time.monotonic(), type(error).__name__, str(error), traceback.format_exc()))
        reply = ()
        order = None
        connection.send_bytes(packed)


def die_with_parent() -> None:
    """The kernel kills this rank when the fork server ends, which ends when pytest does, however that happens."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def _seed() -> None:
    import random

    import numpy

    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


class _State:
    """What a function may change in the process, as it is at the start, and the way back to it."""

    # DeepSpeed keeps the mpu, groups, contexts and activation checkpointing's settings in the globals of these modules.
    # All plain values in them are restored, so that a global which a new version adds is too.
    MODULES = (
        "deepspeed.utils.groups",
        "deepspeed.runtime.activation_checkpointing.checkpointing",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.runtime.zero.parameter_offload",
    )

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self.folder = os.getcwd()
        self.path = list(sys.path)
        self.globals: dict[str, dict[str, Any]] = {}
        for name in self.MODULES:
            variables = vars(importlib.import_module(name))
            self.globals[name] = {
                key: list(value) if isinstance(value, list) else dict(value) if isinstance(value, dict) else value
                for key, value in variables.items()
                if not key.startswith("__")
                and (value is None or isinstance(value, (bool, int, float, str, list, dict)))
            }

    def restore(self) -> None:
        for name, saved in self.globals.items():
            module = sys.modules[name]
            for key, value in saved.items():
                current = getattr(module, key, None)
                # In place where possible: other modules hold the same list or dictionary.
                if isinstance(value, list) and isinstance(current, list):
                    current[:] = value
                elif isinstance(value, dict) and isinstance(current, dict):
                    current.clear()
                    current.update(value)
                else:
                    setattr(module, key, value)
        from deepspeed.comm import comm
        from deepspeed.runtime.activation_checkpointing import checkpointing

        checkpointing.get_cuda_rng_tracker().reset()
        comm.timers.timers.clear()
        comm.timer_summary.clear()
        comm.comms_logger.comms_dict.clear()
        comm.comms_logger.enabled = False
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        from deepspeed.runtime.engine import DeepSpeedEngine

        # An engine hangs on its parameters through autograd hooks, a cycle that the collector can't see: it would stay
        # for ever with its groups' threads (measured: 3 threads and 5 descriptors an engine). Under ZeRO-3 destroy()
        # leaves hooks, so what they hold is emptied too. By their own type: `isinstance` would ask what a weak proxy
        # stands for, which may be gone (torch's compiler has some).
        engines = [found for found in gc.get_objects() if issubclass(type(found), DeepSpeedEngine)]
        while engines:
            engine = engines.pop()
            if vars(engine).get("_modules") is None:
                continue  # emptied before, but a hook still has the shell
            engine.destroy()
            optimizer = getattr(engine, "optimizer", None)
            for holder in (optimizer, getattr(optimizer, "parameter_offload", None), engine):
                if holder is not None:
                    vars(holder).clear()
            del engine, optimizer, holder
        gc.collect()
        gc.freeze()  # what is left stays: the next collection need not look at it
        for group in _groups():
            if group not in _kept_groups:
                torch.distributed.destroy_process_group(group)


def _groups() -> list[Any]:
    """The process groups of this process but for the world."""
    if not torch.distributed.is_initialized():
        return []
    from torch.distributed import distributed_c10d

    return [group for group in distributed_c10d._world.pg_map if group is not torch.distributed.group.WORLD]


def _resolve(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
