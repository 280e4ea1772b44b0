"""What a watch makes of the positions of ranks: who waits for whom, and who is slow."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.launched import ROOT, run
from tests.waits import patience, wait_until
from zero_tp.process.flight_recorder import collective_progress
from zero_tp.process.positions import Heard, Position, report
from zero_tp.process.watch import Watch

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


def test_all_ranks_of_a_machine_that_is_gone_are_waited_for_wherever_each_was_last() -> None:
    first = replace(HERE, count=88, doing="forward", waiting=False, told=1100.0)
    second = replace(HERE, count=89, told=1101.0)
    found = report({0: HERE, 1: HERE, 2: first, 3: second}, 4, HERE, 60)
    assert found.endswith("ranks 0 and 1 wait for ranks 2 and 3")
    ahead = replace(HERE, count=91, told=1100.0)
    assert report({0: HERE, 1: ahead}, 2, HERE, 60).endswith("rank 0 waits for rank 1")


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
        ranks[said - 1]._say(store)
        assert sorted(ranks[0]._told_by(store, range(3))) == list(range(said))


LOOKS = 4


def looked_at(heard: Heard, told: float, phase: str = "save") -> str:
    """Why the job ends when ranks 0 and 1 have said something new, and rank 2 at `told`."""
    new = time.monotonic()
    speaking, third = replace(HERE, told=new), replace(HERE, told=told, phase=phase)
    return heard.silence({0: speaking, 1: speaking, 2: third}, new)


def test_a_rank_whose_word_stays_the_old_one_ends_the_job() -> None:
    heard = Heard(60, 240)
    for _ in range(2):  # it speaks in time, and then no more
        for look in range(LOOKS):
            assert not looked_at(heard, 7.0), look
        assert not looked_at(heard, 8.0)
    for look in range(1, LOOKS + 1):
        assert bool(looked_at(heard, 8.0)) == (look == LOOKS)


def test_silence_for_ever_is_allowed() -> None:
    heard = Heard(60, None)
    assert not any(looked_at(heard, 7.0) for _ in range(99)) and not any(heard.no_answer(15) for _ in range(99))


def test_a_rank_that_has_ended_its_work_need_not_speak() -> None:
    heard = Heard(60, 240)
    assert not any(looked_at(heard, 7.0, "end") for _ in range(3 * LOOKS))


def test_silence_is_told_of_all_ranks_of_a_machine() -> None:
    """One of them may have spoken just after a look at which the other had not."""
    heard, gone = Heard(60, 240), replace(HERE, phase="save", doing="", told=1120.0, host="b")
    for look in range(LOOKS + 1):
        first, third = replace(HERE, told=1100.0 + look), replace(gone, told=1119.0 if look == 0 else 1120.0)
        told = heard.silence({0: first, 2: third, 3: gone}, 1300.0)
    assert told.splitlines() == [
        "rank 2 (b) in save 17 for 300 s, at all_reduce, last heard of 180 s ago",
        "rank 3 (b) in save 17 for 300 s, at all_reduce, last heard of 180 s ago",
        "error: no word from ranks 2 and 3 (b) for 4 minutes, by zero_tp.training.timeout_minutes.heartbeat: the "
        "machine, its network or the process is gone, or stands still",
    ]


def test_turns_without_an_answer_end_the_job_and_count_no_more_than_they_take() -> None:
    heard = Heard(60, 240)
    assert not heard.no_answer(3600), "this rank was stopped meanwhile"
    turns = 1
    while not (told := heard.no_answer(15)):
        turns += 1
    assert turns == 15
    assert "has had no answer from the ranks' store for 4 minutes, by zero_tp.training.timeout_minutes.heart" in told


class Connection:
    """A connection to a store: its requests fail when it is broken, and have no answer when it is mute."""

    def __init__(self, store: dist.Store, mute: threading.Event) -> None:
        self.store, self.broken, self.mute = store, False, mute

    def __getattr__(self, name: str) -> Any:
        if self.broken:
            raise RuntimeError("Broken pipe")
        while self.mute.is_set():
            time.sleep(0.05)
        return getattr(self.store, name)


class Telling:
    """A rank's watch that tells the others in a save after some steps, its connections, and why it ends."""

    def __init__(self, store: dist.Store, rank: int, world: int, heartbeat: float | None) -> None:
        self.watch, self.made, self.told, self.mute = Watch(), list[Connection](), list[str](), threading.Event()
        self._inner = store
        self.watch.end = self.told.append
        self.watch.begin({}, rank, world, heartbeat)
        self.watch._connection = self._connect
        for step in range(3):
            self.watch.enter("step", step)
        self.watch.enter("save", 500)
        self.watch._teller.start()

    def _connect(self) -> Connection:
        self.made.append(Connection(self._inner, self.mute))
        return self.made[-1]

    def alive(self) -> bool:
        return bool(self.made) and not self.made[-1].broken


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_gone_ends_the_others_though_none_waits_for_it(lost: int) -> None:
    store = dist.HashStore()
    ranks = [Telling(store, rank, 3, 1.5) for rank in range(3)]
    ended = [each.told for rank, each in enumerate(ranks) if rank != lost and 0 in (rank, lost)]
    time.sleep(2.5)
    assert not any(each.told for each in ranks)
    gone = ranks[lost].watch
    gone._position = replace(gone._position, phase="save")
    gone._say = lambda store: None  # type: ignore[method-assign]  # as a machine does whose power goes
    wait_until(lambda: all(ended), 20, "nobody misses it", 0.05)
    for told in ended:
        [text] = told
        where, error = text.splitlines()
        assert where.startswith(f"rank {lost} (") and ") in save 500 for " in where and "last heard of " in where
        assert error.startswith(f"error: no word from rank {lost} (")
    for each in ranks:
        each.watch.leave()


def test_a_rank_that_has_left_is_not_missed() -> None:
    first, second = (Telling(store, rank, 2, 0.4) for store in [dist.HashStore()] for rank in range(2))
    wait_until(lambda: first.watch._store and second.watch._store, 10, "no connection", 0.02)
    second.watch.leave()
    assert first.watch._told_by(first.watch._store, [1])[1].phase == "end"
    time.sleep(1.5)
    first.watch.leave()
    assert not first.told


def test_a_connection_that_breaks_is_made_anew() -> None:
    first, second = (Telling(store, rank, 2, 0.6) for store in [dist.HashStore()] for rank in range(2))
    for each in (first, second, first):
        wait_until(each.alive, 10, "no connection", 0.02)
        each.made[-1].broken = True
        wait_until(each.alive, 10, "no new connection", 0.02)
        time.sleep(0.8)
    assert not first.told and not second.told, "both have spoken again in time"
    for each in (first, second):
        each.watch.leave()


def test_a_store_that_does_not_answer_is_left_and_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_tp.process.watch.ANSWER_SECONDS", 0.2)
    rank = Telling(dist.HashStore(), 1, 2, 3.0)
    wait_until(rank.alive, 10, "no connection", 0.02)
    rank.mute.set()
    wait_until(lambda: len(rank.made) > 1, 10, "it keeps a connection that is mute", 0.02)
    rank.mute.clear()
    time.sleep(0.5)
    assert not rank.told, "it has been answered in time"
    rank.mute.set()
    wait_until(lambda: rank.told, 20, "it waits for ever", 0.05)
    assert "has had no answer from the ranks' store for 0.05 minutes" in rank.told[0]
    rank.mute.clear()
    rank.watch.leave()


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


def test_collectives_of_gloo_are_counted_where_torch_knows_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library's recorder has its own collectives."""
    gloo = '{"pg_status": {"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}}}'
    nccl = '{"pg_status": {"1": {"last_enqueued_collective": 7, "last_completed_collective": 7}}}'
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda _: gloo)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda _: "{}", raising=False)
    assert collective_progress(["world"]) == "world 3/2"
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda _: nccl)
    assert collective_progress(["world", "TP"]) == "world 3/2, TP 7/7"
