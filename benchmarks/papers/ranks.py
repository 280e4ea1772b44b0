"""Start ranks as processes of this machine for a measurement, and wait for them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from zero_tp.base.errors import UserError
from zero_tp.engine.zero.ops import disable_shared_memory_collectives
from zero_tp.run.process.environment import free_port
from zero_tp.run.process.quiet import suppress_output

T = TypeVar("T")
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""Variables that libraries read when they are imported."""
POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0
"""For the other ranks after one has failed."""


def on_ranks(
    function: Callable[..., T], ranks: int, *arguments: Any, seconds: float = 600.0
) -> list[T]:
    """Run `function(*arguments)` on CPU ranks over gloo; return its results by rank.

    Args:
        function: at the top level of a module; called after torch.distributed and DeepSpeed are
            initialised.
        arguments: pickled, as are the results.
        seconds: time limit.

    Raises:
        UserError: the ranks took longer.
        torch.multiprocessing.ProcessRaisedException: a rank failed; it has the traceback.
    """
    with mock.patch.dict(os.environ, ENVIRONMENT):
        # A fork server imports the libraries once (0.5 s instead of 6 s of CPU per rank).
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["benchmarks.papers.preloaded"])
        readers, writers = zip(*(server.Pipe(duplex=False) for _ in range(ranks)), strict=True)
        context = multiprocessing.start_processes(
            _rank,
            (function, arguments, writers, _meeting(ranks)),
            nprocs=ranks,
            join=False,
            start_method="forkserver",
        )
        for writer in writers:
            writer.close()  # so that reading ends if a rank dies while sending
        results: dict[Connection, T] = {}
        with _ended(context.processes):
            deadline = time.monotonic() + seconds
            while not context.join(POLL_SECONDS, grace_period=GRACE_SECONDS):
                # A rank continues only after its result has been read.
                for reader in (each for each in readers if each not in results and each.poll()):
                    with contextlib.suppress(EOFError):  # it has failed, and `join` raises next
                        results[reader] = reader.recv()
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"{ranks} ranks were not done in {seconds:.0f} s: is the machine busy? Try "
                        "again"
                    )
        return [results[reader] if reader in results else reader.recv() for reader in readers]


def _meeting(ranks: int) -> dict[str, str]:
    """Return the environment that a launcher would set."""
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
    }
    return {name: str(value) for name, value in variables.items()}


@contextlib.contextmanager
def _ended(processes: list[Any]) -> Iterator[None]:
    """Kill the processes that still run at the end of the block."""
    try:
        yield
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


def _rank(
    rank: int,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    writers: Sequence[Connection],
    meeting: dict[str, str],
) -> None:
    os.environ.update(meeting, RANK=str(rank), LOCAL_RANK=str(rank))
    for other, writer in enumerate(writers):
        if other != rank:
            writer.close()
    import deepspeed

    dist.init_process_group("gloo")
    disable_shared_memory_collectives()
    with suppress_output():
        deepspeed.init_distributed("gloo", verbose=False)
    try:
        writers[rank].send(function(*arguments))
        dist.barrier()
    finally:
        dist.destroy_process_group()
