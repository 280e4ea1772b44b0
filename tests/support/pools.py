"""Persistent pools of gloo ranks.

`Pool.run(function, ...)` calls a module-level function on every rank of a world and returns the
results in the order of the ranks. The ranks stay alive between calls: a process that imports torch,
DeepSpeed and transformers costs about ten seconds, a fork of one that has imported them a fraction
of a second, a call on living ranks 7 milliseconds (measured, 4 ranks on 2 cores).

What a function may rely on, on each rank: torch.distributed (gloo) and deepspeed.comm are
initialised, torch has one thread, the random generators of torch, numpy and Python are seeded with
0, the launcher's variables (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set. What
it leaves behind is undone before the next one: process groups, engines, DeepSpeed's globals,
default dtype, environment variables, the working directory. `cached` keeps what is worth keeping.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.support.pool_rank import pack, rank_main, unpack
from tests.support.waits import patience

T = TypeVar("T")

# Once one rank has failed, the others get this long to report too (seconds): most wait in a
# collective for ever.
GRACE = 1.0
START_SECONDS = 120.0  # more for the first function after a start
SHOWN_LINES = 100  # of what a rank printed, its stacks included

RANK_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "MASTER_ADDR": "127.0.0.1",
    # Without a name gloo resolves the host's own, which fails in containers without such an entry.
    "GLOO_SOCKET_IFNAME": "lo",
}


def preloaded_context() -> Any:
    """Return the context whose processes are forks of one that has imported the libraries."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    return context


class RankError(Exception):
    """A function failed on a rank.

    `rank` is its number, `kind` the name of the exception's class (None after a time-out or a
    death), `message` its text; str() also has that rank's traceback and what it had printed.
    """

    def __init__(self, rank: int, text: str, kind: str | None = None, message: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.kind = kind
        self.message = message


class Pool:
    """`world` ranks, started at the first `run` and after each failure that may have left them
    out of step.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None

    def run(
        self, function: Callable[..., T], *args: Any, timeout: float = 120, **kwargs: Any
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on every rank and return the results by rank, tensors as
        copies.

        The function is sent by its name, so it stands at the top level of a module (a test module
        will do).

        Raises:
            RankError: with the traceback of the rank that failed first, or, after `timeout` seconds
                of an idle machine (tests/support/waits.py), with the stacks of the ranks that did
                not answer.
        """
        name = f"{function.__module__}:{function.__qualname__}"
        if "<" in name or function.__module__ == "__main__":
            raise ValueError(
                f"{name}: only a function at the top level of a module can be sent to ranks"
            )
        try:
            if not self._processes:
                self._start()
                timeout += START_SECONDS
            replies = self._exchange(pack((name, args, kwargs)), timeout, name)
        except (
            BaseException
        ):  # also an interrupt, pytest-timeout: the ranks are in the middle of something
            self.kill()
            raise
        errors = {rank: reply for rank, reply in replies.items() if reply[0] == "error"}
        if not errors:
            return [replies[rank][1] for rank in range(self.world)]
        first = min(errors, key=lambda rank: errors[rank][1])  # later errors may be its consequence
        _, _, kind, message, trace = errors[first]
        text = f"rank {first} of {self.world} failed in {name}:\n{trace}{self._output(first)}"
        # The same refusal on every rank leaves no collective half done.
        if len(errors) < self.world or len({error[2] for error in errors.values()}) > 1:
            self.kill()
        raise RankError(first, text, kind, message)

    def _start(self) -> None:
        context = preloaded_context()
        self._folder = tempfile.TemporaryDirectory(prefix="zero_tp_ranks_")
        # The store is in this process: a port that a rank had to find free could be taken before it
        # is used.
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            variables = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.world,
                "LOCAL_WORLD_SIZE": self.world,
            }
            variables["MASTER_PORT"] = self._store.port
            environment = (
                dict(os.environ)
                | RANK_ENVIRONMENT
                | {key: str(value) for key, value in variables.items()}
            )
            arguments = (theirs, rank, self.world, environment, str(self._output_file(rank)))
            process = context.Process(target=rank_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _exchange(self, order: bytes, timeout: float, name: str) -> dict[int, Any]:
        """Send an order and return the replies by rank, without ranks still silent `GRACE` after
        the first failure.
        """
        replies: dict[int, Any] = {}
        timeout = patience(timeout)
        deadline = time.monotonic() + timeout
        waiting: dict[Any, int] = {}
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(order)
            except OSError:
                raise self._death(rank, name, replies) from None
            waiting[connection] = rank
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready and any(reply[0] == "error" for reply in replies.values()):
                break
            if not ready:
                silent = [rank for rank in waiting.values() if rank not in replies]
                raise self._silence(silent or list(waiting.values()), timeout, name)
            for connection in ready:
                rank = waiting[connection]
                try:
                    reply = unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    # Others may have failed because of it, and replied before.
                    raise self._death(rank, name, replies) from None
                if reply[0] != "ready":
                    replies[rank] = reply
                if reply[0] != "result":
                    del waiting[connection]
                if reply[0] == "error":
                    deadline = min(deadline, time.monotonic() + patience(GRACE))
        return replies

    def _death(self, rank: int, name: str, replies: dict[int, Any]) -> RankError:
        self._processes[rank].join(patience(5))
        text = (
            f"rank {rank} of {self.world} died in {name} with exit status "
            f"{self._processes[rank].exitcode}"
        )
        others = "".join(f"\n{reply[-1]}" for reply in replies.values() if reply[0] == "error")
        return RankError(rank, text + self._output(rank) + others)

    def _silence(self, silent: list[int], timeout: float, name: str) -> RankError:
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        # Faulthandler answers even where Python doesn't: inside a collective.
        time.sleep(patience(0.5))
        text = f"no answer from ranks {silent} of {self.world} in {name} after {timeout:.0f} s"
        return RankError(silent[0], text + "".join(map(self._output, silent)))

    def _output_file(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, str(rank))

    def _output(self, rank: int) -> str:
        file = self._output_file(rank)
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return "\n".join([f"\n--- printed by rank {rank}", *lines[-SHOWN_LINES:]]) if lines else ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """End the ranks at once. The next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._store = [], [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class Pools:
    """The pools of a test session: `pools(world)`."""

    def __init__(self) -> None:
        self._pools: dict[int, Pool] = {}

    def __call__(self, world: int) -> Pool:
        return self._pools.setdefault(world, Pool(world))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.kill()
