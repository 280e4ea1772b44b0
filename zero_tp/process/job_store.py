"""Ranks meet in the job's store before their first process group; none waits there for one that has refused.

Each rank posts that it is ready, or that it refuses. The last rank that is ready, or the first one that refuses, sets
the outcome that all ranks wait for. The store is that of `torch.distributed`: rank 0's, or torchrun's agent's.
"""

from __future__ import annotations

import os
import resource
from datetime import timedelta
from typing import TYPE_CHECKING

from zero_tp.errors import UserError

if TYPE_CHECKING:
    import torch.distributed as dist

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable that is "True" if torchrun's agent, and not rank 0, serves the store."""
JOIN_LIMIT = timedelta(minutes=5)
REFUSAL_LIMIT = timedelta(seconds=10)
READY = b"ready"


class PeerRefused(UserError):
    """Another rank has refused, and has printed why."""


class JobStore:
    """The store of one job, as one of its ranks uses it. It loads torch when the rank joins."""

    def __init__(self, rank: int, world: int, several_nodes: bool) -> None:
        self._rank, self._world, self._several_nodes = rank, world, several_nodes
        self._store: dist.Store | None = None

    def join(self, limit: timedelta = JOIN_LIMIT) -> dist.Store:
        """Connect to the store; rank 0 serves it. torch's own process group then shares the server of this process.

        Raises:
            RuntimeError: nothing listens there until the limit.
        """
        import torch.distributed as dist

        if self._store is None:
            allow_connections(self._world)
            store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=self._rank == 0 and os.environ.get(AGENT_STORE) != "True",
                timeout=limit,
                wait_for_workers=False,
                multi_tenant=True,
            )
            self._store = dist.PrefixStore("zero_tp/start", store)
        return self._store

    def wait_until_all_ready(self, limit: timedelta) -> None:
        """Post that this rank is ready and wait for all others. Collective.

        Raises:
            PeerRefused: another rank has refused.
            RuntimeError: the limit has passed, or the store is gone.
        """
        store = self.join()
        if store.add("ready", 1) == self._world:
            store.compare_set("outcome", "", READY.decode())
        store.wait(["outcome"], limit)
        outcome = store.get("outcome")
        if outcome != READY:
            raise PeerRefused(f"refused by {outcome.decode()}")

    def refuse(self, name: str) -> bool | None:
        """Post that this rank, called `name`, refuses.

        Returns:
            Whether it is the first to refuse. None without a store: on one machine before `join`, or if it is gone.
        """
        if self._store is None and not (self._several_nodes and os.environ.get("MASTER_PORT")):
            return None
        try:
            store = self.join(REFUSAL_LIMIT)
            is_first: bool = store.add("refused", 1) == 1
            store.compare_set("outcome", "", name)
        except (RuntimeError, OSError):  # what torch raises for a store that is not there, or gone
            return None
        return is_first


def allow_connections(world: int) -> None:
    """Let this process hold the connections of a job of `world` ranks, as far as its hard limit of open files goes.

    The store has three with each rank, and gloo one between any two; the soft limit is often 1,024 files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 4 * world
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
