"""The job's store, where ranks agree to start before they create their first process group.

A rank refuses to start if its input is wrong (`UserError`). Each rank posts "ready", or its
refusal. The last rank to be ready, or the first to refuse, writes the outcome, and all ranks wait
for it. So no rank waits in a process group for one that has refused. The server is that of
`torch.distributed`: rank 0's, or torchrun's agent's. Three ranks; rank 2 lacks a corpus:

    rank 0    add("ready") → 1             waits for "outcome"
    rank 1    add("ready") → 2             waits for "outcome"
    rank 2    add("refused") → 1: prints   compare_set("outcome", "", "rank 2 (node2)")
    rank 0, 1                              get("outcome") → "rank 2 (node2) refused to start"
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import TYPE_CHECKING

from zero_tp.base.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""This variable is "True" if torchrun's agent, and not rank 0, serves the store."""
JOIN_LIMIT = timedelta(minutes=5)
REFUSAL_LIMIT = timedelta(seconds=10)
READY = b"ready"


class PeerRefused(UserError):
    """Another rank has refused to start, and has printed why."""


class JobStore:
    """One rank's client of the job's store. It imports torch when the rank joins."""

    def __init__(self, rank: int, world: int, is_multi_node: bool) -> None:
        self._rank = rank
        self._world = world
        self._is_multi_node = is_multi_node
        self._store: dist.Store | None = None

    def join(self, limit: timedelta = JOIN_LIMIT) -> dist.Store:
        """Connect to the store.

        Rank 0 starts its server, which torch's process group will use too.
        """
        import torch.distributed as dist

        if self._store is None:
            raise_open_file_limit(self._world)
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=self._rank == 0 and os.environ.get(AGENT_STORE) != "True",
                timeout=limit,
                # Else rank 0 would wait here for all ranks, and one that has refused would never
                # come.
                wait_for_workers=False,
                # Lets torch's own rendezvous open the same port again in rank 0's process and get
                # this server.
                multi_tenant=True,
            )
            # A prefix, because the process group writes its own keys into the same server.
            self._store = dist.PrefixStore("zero_tp/start", store)
        return self._store

    def wait_until_all_ready(self, limit: timedelta) -> None:
        """Post that this rank is ready and wait for all others. Collective.

        Raises:
            PeerRefused: another rank has refused to start.
            RuntimeError: the limit has passed, or the store cannot be reached.
        """
        store = self.join()
        # `compare_set` writes only if there is no outcome yet, so a refusal that came first stays.
        if store.add("ready", 1) == self._world:
            store.compare_set("outcome", "", READY.decode())
        store.wait(["outcome"], limit)
        try:
            outcome = store.get("outcome")
        except (
            RuntimeError
        ) as error:  # on one machine rank 0 exits with its store once it knows of a refusal
            raise PeerRefused("a rank refused to start, and rank 0 has ended") from error
        if outcome != READY:
            raise PeerRefused(f"{outcome.decode()} refused to start")

    def refuse(self, name: str) -> bool | None:
        """Post that this rank, called `name`, refuses to start.

        Returns:
            Whether it is the first to refuse. None without a store: on one machine before `join`,
            or if it cannot be reached.
        """
        # On one machine all ranks make the same checks before they join, and local rank 0 prints.
        # Joining would load torch, which takes seconds.
        if self._store is None and not (self._is_multi_node and os.environ.get("MASTER_PORT")):
            return None
        try:
            store = self.join(REFUSAL_LIMIT)
            is_first: bool = store.add("refused", 1) == 1
            store.compare_set("outcome", "", name)
        except (RuntimeError, OSError):  # torch's errors for a store that cannot be reached
            return None
        return is_first


def raise_open_file_limit(world: int) -> None:
    """Raise this process's limit of open files to what a job of `world` ranks needs.

    The hard limit is not raised.

    The store has three connections to each rank, and gloo one between any two. The soft limit is
    often 1,024 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Three connections of the store and one of gloo a rank, and the usual limit for everything
    # else.
    wanted = 1024 + 4 * world
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
