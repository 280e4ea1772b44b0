"""Ranks meet before their first process group: all go on, or all end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from tests.support.launched import free_port
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.job_store import JobStore, PeerRefused

LIMIT = timedelta(seconds=60)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[JobStore]:
    """Those of three ranks, on two machines."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return [RankEnvironment(rank, 3, rank % 2, 2).store for rank in range(3)]


def on_all(stores: list[JobStore], work: Callable[[int], str]) -> list[str]:
    """What `work` raises on each rank, in threads."""

    def run(rank: int) -> str:
        try:
            return work(rank)
        except PeerRefused as error:
            return str(error)

    with ThreadPoolExecutor(len(stores)) as threads:
        return list(threads.map(run, range(len(stores))))


def test_all_go_on_once_all_are_ready(stores: list[JobStore]) -> None:
    ready: list[int] = []

    def work(rank: int) -> str:
        stores[rank].join(LIMIT)
        time.sleep(0.2 * rank)
        ready.append(rank)
        stores[rank].wait_until_all_ready(LIMIT)
        assert len(ready) == 3
        return "ready"

    assert on_all(stores, work) == ["ready"] * 3


def test_all_end_when_some_refuse_and_one_of_them_is_the_first(stores: list[JobStore]) -> None:
    first: list[bool | None] = []

    def work(rank: int) -> str:
        if rank == 0:
            stores[rank].wait_until_all_ready(LIMIT)
        first.append(stores[rank].refuse(f"rank {rank}"))
        return "refused"

    ended, *refused = on_all(stores, work)
    assert ended.startswith("refused by rank ") and refused == ["refused"] * 2
    assert sorted(map(bool, first)) == [False, True] and None not in first


def test_without_a_store_nobody_is_asked(stores: list[JobStore], monkeypatch: pytest.MonkeyPatch) -> None:
    alone = RankEnvironment(0, 2, 0, 2).store  # one machine, before torch is loaded
    assert alone.refuse("rank 0") is None
    monkeypatch.setattr("zero_tp.process.job_store.REFUSAL_LIMIT", timedelta(seconds=1))
    assert stores[2].refuse("rank 2") is None, "rank 0 serves no store"
