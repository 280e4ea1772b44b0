"""What a watch makes of the positions of ranks: who waits for whom, and who is slow."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import torch.distributed as dist

from tests.launched import ROOT, run
from tests.waits import patience
from zero_tp.process.watch import Position, Watch, report, stragglers

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
        assert sorted(ranks[0]._everyone()) == list(range(said))


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
