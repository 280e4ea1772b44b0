"""Ranks meet in the job's store before their first process group: all start, or all end."""

from __future__ import annotations

import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from tests.support.launched import free_port
from zero_tp.run.process.connect import START_TIMEOUT
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.job_store import JobStore, PeerRefused, raise_open_file_limit

LIMIT = timedelta(seconds=60)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[JobStore]:
    """The stores of three ranks on two machines."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return [RankEnvironment(rank, 3, rank % 2, 2).store for rank in range(3)]


def on_all(stores: list[JobStore], work: Callable[[int], str]) -> list[str]:
    """Run `work` for each rank, in threads; return its result, or the refusal."""

    def run(rank: int) -> str:
        try:
            return work(rank)
        except PeerRefused as error:
            return str(error)

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(run, range(len(stores))))


def test_all_end_when_some_refuse_and_one_of_them_is_the_first(stores: list[JobStore]) -> None:
    first: list[bool | None] = []

    def work(rank: int) -> str:
        if rank == 0:
            stores[rank].wait_until_all_ready(START_TIMEOUT)
        first.append(stores[rank].refuse(f"rank {rank}"))
        return "refused"

    ended, *refused = on_all(stores, work)
    assert (
        ended in ("rank 1 refused to start", "rank 2 refused to start")
        and refused == ["refused"] * 2
    )
    assert sorted(map(bool, first)) == [False, True] and None not in first


class EndingStore:
    """The store of `rank`, which ends with rank 0's process between the wait for the outcome and
    reading it.
    """

    def __init__(self, stores: list[JobStore], rank: int) -> None:
        self.stores, self.store = stores, stores[rank].join(LIMIT)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        self.store.wait(keys, limit)
        self.stores[0]._store = None  # the only reference to the server


def test_a_rank_whose_store_ends_before_it_reads_the_outcome_ends_like_one_that_reads_a_refusal(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    stores[0].join(LIMIT)
    monkeypatch.setattr(stores[1], "_store", EndingStore(stores, 1))
    assert stores[0].refuse("rank 0")
    with pytest.raises(PeerRefused, match="rank 0 has ended"):
        stores[1].wait_until_all_ready(LIMIT)


@pytest.mark.slow
def test_without_a_store_a_refusal_has_no_order(
    stores: list[JobStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = RankEnvironment(0, 2, 0, 2).store  # one machine, before torch is loaded
    assert alone.refuse("rank 0") is None
    monkeypatch.setattr("zero_tp.run.process.job_store.REFUSAL_LIMIT", timedelta(seconds=1))
    assert stores[2].refuse("rank 2") is None, "rank 0 serves no store"


def test_a_large_job_has_files_for_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    for limits, world in (
        ((1024, 4096), 8),
        ((1024, 4096), 512),
        ((1024, 4096), 4096),
        ((65536, 65536), 4096),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        raise_open_file_limit(world)
    assert limits_set == [(1056, 4096), (3072, 4096), (4096, 4096)]
