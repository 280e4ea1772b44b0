"""Persistent pools of gloo ranks.

`Pool.run(function, ...)` calls a module-level function on every rank of a world and returns the results in the order of
the ranks. The ranks stay alive between calls: a process that imports torch, DeepSpeed and transformers costs about ten
seconds, a fork of one that has imported them a fraction of a second, a call on living ranks 7 milliseconds (measured, 4
ranks on 2 cores).

What a function may rely on, on each rank: torch.distributed (gloo) and deepspeed.comm are initialised, torch has one
thread, the random generators of torch, numpy and Python are seeded with 0, the launcher's variables (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT) are set. What it leaves behind is undone before the next one: process groups,
engines, DeepSpeed's globals, default dtype, environment variables, the working directory. `cached` keeps what is worth
keeping.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

import torch

from tests.support.pool_rank import pack, rank_main, unpack
from tests.support.waits import patience

T = TypeVar("T")

# Once one rank has failed, the others get this long to report too (seconds): most wait in a collective for ever.
GRACE = 1.0

RANK_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # Without a name gloo resolves the host's own, which fails in containers without such an entry.
    "GLOO_SOCKET_IFNAME": "lo",
}


class RankError(Exception):
    """A function failed on a rank.

    `rank` is its number, `kind` the name of the exception's class (None after a time-out or a death), `message` its
    text; str() also has that rank's traceback and what it had printed.
    """

    def __init__(self, rank: int, text: str, kind: str | None = None, message: str = "") -> None:
        super().__init__(text)
        self.rank = rank
        self.kind = kind
        self.message = message


class Pool:
    """`world` ranks, started at the first `run` and after each failure that may have left them out of step."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: Any = None

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 120, **kwargs: Any) -> list[T]:
        """Calls `function(*args, **kwargs)` on every rank and returns the results by rank, tensors as copies.

        The function is sent by its name, so it stands at the top level of a module (a test module will do).
        Raises RankError with the traceback of the rank that failed first, or, after `timeout` seconds of an idle
        machine (tests/support/waits.py), with the stacks of the ranks that didn't answer.
        """
        name = _reference(function)
        if not self._processes:
            self._start()
        order = pack(("run", name, args, kwargs))
        try:
            replies = self._exchange(order, timeout, name)
            failure = self._failure(replies, name)
            kinds = {reply[2] if reply and reply[0] == "error" else None for reply in replies}
            if failure is not None and len(kinds) > 1:
                self.kill()
                raise failure
            # The same refusal on every rank leaves no collective half done.
            after = self._failure(self._exchange(pack(("reset",)), 30, "reset"), f"reset after {name}")
            if after is not None:
                self.kill()
            found = failure or after
            if found is not None:
                raise found
        except RankError:
            raise
        except BaseException:  # an interrupt, pytest-timeout: the ranks are in the middle of something
            self.kill()
            raise
        return [reply[1] for reply in replies if reply is not None]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # The fork server keeps the environment that it was started with.
        with _environment(RANK_ENVIRONMENT):
            context.set_forkserver_preload(["tests.support.preloaded"])
            forkserver.ensure_running()
        self._folder = tempfile.TemporaryDirectory(prefix="zero_tp_ranks_")
        # The store lives here: a port that a rank had to find free could be taken before it is used.
        self._store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            environment = RANK_ENVIRONMENT | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(self.world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
            }
            files = (str(self._file(rank, "output")), str(self._file(rank, "stack")))
            process = context.Process(
                target=rank_main, args=(theirs, rank, self.world, dict(os.environ) | environment, files), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        try:
            failure = self._failure(self._exchange(pack(("reset",)), 120, "starting the ranks"), "the start")
            if failure is not None:
                raise failure
        except BaseException:
            self.kill()
            raise

    def _exchange(self, order: bytes, timeout: float, what: str) -> list[Any]:
        """Sends an order, gathers the replies by rank; None for a rank still silent `GRACE` after the first failure."""
        replies: list[Any] = [None] * self.world
        timeout = patience(timeout)
        deadline = time.monotonic() + timeout
        failing = False
        for rank, ours in enumerate(self._connections):
            try:
                ours.send_bytes(order)
            except OSError:
                self._died(rank, what)
        waiting: dict[Any, int] = dict(zip(self._connections, range(self.world), strict=True))
        while waiting:
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                if failing:
                    return replies
                self._timed_out(sorted(waiting.values()), timeout, what)
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    replies[rank] = unpack(connection.recv_bytes())
                except (EOFError, OSError):
                    self._died(rank, what, replies)  # others may have failed because of it, and said so before
                if replies[rank] is not None and replies[rank][0] == "error" and not failing:
                    failing = True
                    deadline = min(deadline, time.monotonic() + patience(GRACE))
        return replies

    def _failure(self, replies: list[Any], name: str) -> RankError | None:
        """The error of the rank that failed first: later ones may be its consequence."""
        errors = {rank: reply for rank, reply in enumerate(replies) if reply and reply[0] == "error"}
        if not errors:
            return None
        rank = min(errors, key=lambda rank: errors[rank][1])
        _, _, kind, message, trace = errors[rank]
        text = f"rank {rank} of {self.world} failed in {name}:\n{trace}{self._output(rank)}"
        return RankError(rank, text, kind, message)

    def _died(self, rank: int, what: str, replies: Sequence[Any] = ()) -> None:
        self._processes[rank].join(patience(5))
        text = f"rank {rank} of {self.world} died in {what} with exit status {self._processes[rank].exitcode}"
        text += self._output(rank)
        text += "".join(f"\n{reply[-1]}" for reply in replies if reply is not None and reply[0] == "error")
        self.kill()
        raise RankError(rank, text)

    def _timed_out(self, silent: list[int], timeout: float, what: str) -> None:
        for rank in silent:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(patience(0.5))  # faulthandler answers even where Python doesn't: inside a collective
        text = f"no answer from ranks {silent} of {self.world} in {what} after {timeout:.0f} s"
        for rank in silent:
            text += f"\n--- stack of rank {rank}\n{self._file(rank, 'stack').read_text()}{self._output(rank)}"
        self.kill()
        raise RankError(silent[0], text)

    def _file(self, rank: int, kind: str) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"{kind}_{rank}")

    def _output(self, rank: int) -> str:
        text = self._file(rank, "output").read_text(errors="replace")
        return f"\n--- printed by rank {rank}\n" + "\n".join(text.splitlines()[-40:]) if text else ""

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def kill(self) -> None:
        """Ends the ranks at once. The next `run` starts new ones."""
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
        if world not in self._pools:
            self._pools[world] = Pool(world)
        return self._pools[world]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.kill()


def _reference(function: Callable[..., Any]) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or function.__module__ == "__main__":
        raise ValueError(f"{name}: only a function at the top level of a module can be sent to ranks")
    return name


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
