"""What a watch makes of the positions of ranks: who waits for whom, and who is slow."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from tests.launched import ROOT, run
from tests.waits import patience, wait_until
from zero_tp.process.watch import LOOKS, Heard, Position, Watch, report, silence, stragglers

HERE = Position(
    count=90,
    phase="step",
    step=17,
    doing="backward",
    since=1000.0,
    place="all_reduce",
    waiting=True,
    told=1300.0,
    host="a",
)


def test_who_is_behind_is_waited_for() -> None:
    late = replace(HERE, count=89, doing="forward", place="read", waiting=False, host="b")
    *lines, last = report({0: HERE, 1: late, 2: HERE}, 3, HERE, 300).splitlines()
    assert lines[1] == "rank 1 (b) in step 17, forward for 300 s, at read"
    error = "error: no progress in step 17 for 5 minutes, by zero_tp.training.timeout_minutes"
    assert last == f"{error}: ranks 0 and 2 wait for rank 1"


def test_at_the_same_mark_who_does_not_wait_is_waited_for() -> None:
    found = report({0: HERE, 1: replace(HERE, waiting=False, place="sleep")}, 2, HERE, 60)
    assert found.endswith("rank 0 waits for rank 1")
    assert report({0: HERE, 1: HERE}, 2, HERE, 60).endswith("no rank is behind another")


def test_who_is_not_heard_of_is_waited_for() -> None:
    stopped = replace(HERE, told=1100.0)
    lines = report({0: HERE, 1: stopped}, 2, HERE, 60).splitlines()
    assert lines[1].endswith("last heard of 200 s ago") and lines[2].endswith("rank 0 waits for rank 1")
    assert report({0: HERE}, 2, HERE, 60).endswith("rank 0 waits for rank 1")


def test_a_rank_is_lost_after_three_of_its_own_intervals() -> None:
    often = replace(HERE, every=1.0)
    assert report({0: often, 1: replace(often, told=1296.0)}, 2, HERE, 60).endswith("rank 0 waits for rank 1")
    assert report({0: HERE, 1: replace(HERE, told=1296.0)}, 2, HERE, 60).endswith("no rank is behind another")


def test_all_positions_are_read_at_once_and_those_that_are_not_there_are_left_out() -> None:
    store = dist.HashStore()
    ranks = [Watch() for _ in range(3)]
    for number, watch in enumerate(ranks):
        watch._rank, watch._world, watch._store = number, 3, store
    for said in range(1, 4):
        ranks[said - 1]._say()
        assert sorted(ranks[0]._told_by(range(3))) == list(range(said))


def looked_at(heard: Heard, told: float, phase: str = "save") -> list[int]:
    """Who is silent when ranks 0 and 1 have said something new, and rank 2 at `told`."""
    new = time.monotonic()
    speaking, third = replace(HERE, told=new), replace(HERE, told=told, phase=phase)
    return heard.silent({0: speaking, 1: speaking, 2: third})


def test_a_rank_whose_word_stays_the_old_one_is_silent() -> None:
    heard = Heard()
    for _ in range(2):  # it speaks in time, and then no more
        for look in range(LOOKS):
            assert looked_at(heard, 7.0) == [], look
        assert looked_at(heard, 8.0) == []
    for look in range(1, LOOKS + 1):
        assert looked_at(heard, 8.0) == ([2] if look == LOOKS else [])


@pytest.mark.parametrize("phase", ["start", "end"])
def test_a_rank_that_starts_or_has_ended_need_not_speak(phase: str) -> None:
    heard = Heard()
    assert [looked_at(heard, 7.0, phase=phase) for _ in range(3 * LOOKS)] == [[]] * 3 * LOOKS


def test_silence_is_told_with_where_the_ranks_were() -> None:
    gone = replace(HERE, phase="save", doing="", told=1120.0)
    lines = silence({3: replace(gone, host="b"), 2: replace(gone, host="b")}, 1300.0, 180).splitlines()
    assert lines == [
        "rank 2 (b) in save 17 for 300 s, at all_reduce, last heard of 180 s ago",
        "rank 3 (b) in save 17 for 300 s, at all_reduce, last heard of 180 s ago",
        "error: no word from ranks 2 and 3 (b) for 3 minutes, by zero_tp.training.timeout_minutes.heartbeat: "
        "the machine, its network or the process is gone or stands still",
    ]


class Failing:
    """A store whose next requests fail, as torch's does when its connection breaks."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.broken = store, False

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError("Broken pipe")
        return getattr(self.store, name)


def anew(connections: list[Failing]) -> bool:
    return not connections[-1].broken


def telling(store: dist.Store, rank: int, world: int, heartbeat: float) -> tuple[Watch, list[Failing], list[str]]:
    """A rank's watch that tells the others by connections to a store, in a save; its connections, and why it ends."""
    watch, made, told = Watch(), list[Failing](), list[str]()

    def connect() -> Failing:
        made.append(Failing(store))
        return made[-1]

    watch.end = told.append
    watch.begin({}, rank, world, heartbeat)
    watch._connection, watch._store = connect, connect()
    watch.enter("save", 500)
    watch._teller.start()
    return watch, made, told


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_gone_ends_the_others_though_none_waits_for_it(lost: int) -> None:
    store = dist.HashStore()
    ranks = [telling(store, rank, 3, 0.5) for rank in range(3)]
    ended = [told for rank, (_, _, told) in enumerate(ranks) if rank != lost and 0 in (rank, lost)]
    spared = [told for rank, (_, _, told) in enumerate(ranks) if 0 not in (rank, lost)]
    time.sleep(1.0)
    assert not any(told for _, _, told in ranks)
    gone = ranks[lost][0]
    gone._left.set()  # as a machine does whose power goes: the others are not told
    wait_until(lambda: all(ended), 20, "nobody misses it", 0.05)
    for told in ended:
        [text] = told
        where, error = text.splitlines()
        assert where.startswith(f"rank {lost} (") and ") in save 500 for " in where and "last heard of " in where
        assert error.startswith(f"error: no word from rank {lost} (")
    assert not any(spared), "the first rank looks at all, they at it"
    for watch, _, _ in ranks:
        watch.leave()


def test_a_rank_that_has_left_is_not_missed() -> None:
    store = dist.HashStore()
    (first, _, told), (second, _, _) = (telling(store, rank, 2, 0.4) for rank in range(2))
    second.leave()
    assert first._told_by([1])[1].phase == "end"
    time.sleep(2.0)
    first.leave()
    assert not told


def test_a_connection_that_breaks_is_made_anew() -> None:
    store = dist.HashStore()
    (first, made, told), (second, others, _) = (telling(store, rank, 2, 0.6) for rank in range(2))
    for connections in (made, others, made):
        connections[-1].broken = True
        wait_until(partial(anew, connections), 10, "no new connection", 0.02)
        time.sleep(1.5)
    assert not told, "both have spoken again in time"
    second._left.set()
    wait_until(lambda: told, 20, "nobody misses it", 0.05)
    first.leave()


def test_a_rank_at_work_twice_as_long_is_slow() -> None:
    def ranks(*busy: int) -> dict[int, Position]:
        return {rank: replace(HERE, steps=40, looks=100, busy=each) for rank, each in enumerate(busy)}

    before = {rank: replace(HERE, steps=0, looks=0, busy=0) for rank in range(4)}
    assert stragglers(before, ranks(45, 40, 95, 47), 60) == [
        "rank 2 (a) is slow: it was at work for 95% of the last 60 s, the other ranks for 45%, and waited for it"
    ]
    assert stragglers(before, ranks(60, 55, 95, 50), 60) == []
    assert stragglers(before, ranks(10, 12, 40, 11), 60) == [], "they do not wait for it"
    assert stragglers(ranks(1, 1, 1, 1), ranks(45, 40, 95, 47), 60) == [], "nothing was looked at"
    assert stragglers({}, {0: replace(HERE, steps=40, looks=100, busy=100)}, 60) == []


def test_only_a_phase_without_marks_reaches_its_limit() -> None:
    ended, told = threading.Event(), list[str]()
    watch = Watch()

    def end(text: str) -> None:
        told.append(text)
        ended.set()

    watch.end = end
    watch.begin({"step": 0.4, "start": None}, 0, 1)
    time.sleep(0.6)
    assert not told, "a start has no limit here"
    for step in range(8):
        watch.enter("step", step)
        time.sleep(0.1)
    assert not told, "each step has a limit of its own"
    watch.mark("forward")
    assert ended.wait(patience(5))
    assert told[0].splitlines()[-1].startswith("error: no progress in step 7 for 0.00667 minutes")
    assert ", forward for 0 s, at wait, called by " not in told[0] and "step 7, forward for" in told[0]
    watch.leave()


COLLECTING = """
import faulthandler, gc, threading
from zero_tp.process.watch import _frames

faulthandler.dump_traceback_later(20, exit=True)  # needs no lock

def garbage(count):
    for _ in range(count):
        ring = [threading.local()]
        ring.append(ring)

for _ in range(100):
    gc.disable()
    garbage(1000)
    spare = [{} for _ in range(99)]  # what is listed takes one of these
    del spare
    gc.enable()  # what allocates next starts a collection
    assert threading.get_ident() in _frames() and gc.isenabled()
"""


def test_looking_starts_no_collection() -> None:
    """Python before 3.12 hangs in a collection that begins while frames are listed."""
    done = run([sys.executable, "-c", COLLECTING], ROOT, limit=60)
    assert done.returncode == 0, done.stderr
