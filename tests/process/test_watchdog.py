"""A watch ends its rank when a phase makes no progress, or when another rank or the store is silent."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d

from tests.support.waits import patience, wait_until
from zero_tp.process.watch import RankStatus, Watchdog, _dump_flight_recorder, collective_progress, describe_hang

HERE = RankStatus(
    count=90, phase="step", step=17, doing="backward", host="a", seconds=300.0, frame="all_reduce", waiting=True
)
ERROR = "error: no progress in step 17 for 5 minutes, by zero_tp.training.timeout_minutes"


def hang(statuses: dict[int, RankStatus], world: int, silent: tuple[int, ...] = ()) -> list[str]:
    return describe_hang(statuses, set(silent), world, HERE, 300).splitlines()


def test_the_rank_with_the_fewest_marks_is_waited_for() -> None:
    late = replace(HERE, count=89, doing="forward", frame="read", waiting=False, host="b")
    *lines, last = hang({0: HERE, 1: late, 2: HERE}, 3)
    assert lines[1] == "rank 1 (b) in step 17, forward for 300 s, at read"
    assert last == f"{ERROR}: ranks 0 and 2 wait for rank 1"


def test_of_ranks_at_the_same_mark_the_one_that_does_not_wait_is_waited_for() -> None:
    assert hang({0: HERE, 1: replace(HERE, waiting=False, frame="sleep")}, 2)[-1] == f"{ERROR}: rank 0 waits for rank 1"
    unknown = replace(HERE, waiting=None, frame="")  # it has not come to its limit
    assert (
        hang({0: HERE, 1: unknown}, 2)[-1] == hang({0: HERE, 1: HERE}, 2)[-1] == f"{ERROR}: no rank is behind another"
    )


def test_silent_ranks_are_waited_for_wherever_each_was_last() -> None:
    behind, ahead = replace(HERE, count=88, waiting=False), replace(HERE, count=91)
    *lines, last = hang({0: HERE, 1: HERE, 2: behind, 3: ahead}, 4, (2, 3))
    assert last == f"{ERROR}: ranks 0 and 1 wait for ranks 2 and 3"
    assert [line.endswith(", silent since") for line in lines] == [False, False, True, True]


class Member:
    """A rank's watch that writes to a store in a save after some steps, and why it ends."""

    def __init__(self, store: Any, rank: int, world: int, heartbeat: float | None, **limits: float) -> None:
        self.watch, self.ends = Watchdog(), list[str]()
        self.watch.end = self.ends.append
        self.watch.begin(limits, rank, world, heartbeat)
        for step in range(3):
            self.watch.enter("step", step)
        self.watch.enter("save", 500)
        self.watch.connect(store=store)


def test_all_statuses_are_read_at_once_and_those_that_are_not_there_are_left_out() -> None:
    store = dist.HashStore()
    first = Member(store, 0, 3, None)
    wait_until(lambda: store.check(["0"]), 10, "it writes nothing", 0.02)
    assert list(first.watch._read(range(3))) == [0]
    for rank in (1, 2):
        Member(store, rank, 3, None)
    wait_until(lambda: store.check(["1", "2"]), 10, "they write nothing", 0.02)
    assert list(first.watch._read(range(3))) == [0, 1, 2]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_gone_ends_the_others_though_none_waits_for_it(lost: int) -> None:
    store = dist.HashStore()
    members = [Member(store, rank, 3, 1.5) for rank in range(3)]
    watching = [member.ends for rank, member in enumerate(members) if rank != lost and 0 in (rank, lost)]
    time.sleep(2.5)
    assert not any(member.ends for member in members)
    members[lost].watch._newest = lambda: HERE  # type: ignore[method-assign]  # as if its machine's power went
    wait_until(lambda: all(watching), 20, "nobody misses it", 0.05)
    for [text] in watching:
        status, error = text.splitlines()
        assert status.startswith(f"rank {lost} (a) in step 17, backward for 300 s")
        assert error == (
            f"error: no word from rank {lost} (a) for 0.025 minutes, by zero_tp.training.timeout_minutes.heartbeat: "
            "the machine, its network or the process has stopped"
        )
    for member in members:
        member.watch.leave()


def test_silence_for_ever_is_allowed() -> None:
    store = dist.HashStore()
    first, second = (Member(store, rank, 2, None, step=0.4) for rank in range(2))
    second.watch._newest = lambda: HERE  # type: ignore[method-assign]
    time.sleep(2)
    assert not first.ends and not second.ends


def test_a_rank_that_has_left_is_not_missed() -> None:
    store = dist.HashStore()
    first, second = (Member(store, rank, 2, 0.4) for rank in range(2))
    wait_until(lambda: store.check(["0", "1"]), 10, "they write nothing", 0.02)
    second.watch.leave()
    assert first.watch._read([1])[1].phase == "end"
    time.sleep(1.5)
    first.watch.leave()
    assert not first.ends


class MuteStore:
    """A store that answers no more, once `mute` is set: as that of a machine without power."""

    def __init__(self) -> None:
        self.store, self.mute = dist.HashStore(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        while self.mute.is_set():
            time.sleep(0.05)
        return getattr(self.store, name)


def test_a_store_that_does_not_answer_ends_the_rank() -> None:
    store = MuteStore()
    member = Member(store, 1, 2, 3.0)
    for pause in (1.5, 1.5):
        store.mute.set()
        time.sleep(pause)
        store.mute.clear()
        time.sleep(1)
        assert not member.ends, "it has been answered in time"
    store.mute.set()
    wait_until(lambda: member.ends, 20, "it waits for ever", 0.05)
    assert "has had no answer from the ranks' store for 0.05 minutes" in member.ends[0]
    store.mute.clear()


def test_only_a_phase_without_marks_reaches_its_limit() -> None:
    ended, ends = threading.Event(), list[str]()
    watch = Watchdog()

    def end(text: str) -> None:
        ends.append(text)
        ended.set()

    watch.end = end
    watch.begin({"step": 0.6, "start": None}, 0, 1)
    time.sleep(0.9)
    assert not ends, "a start has no limit here"
    for step in range(10):
        watch.enter("step", step)
        time.sleep(0.1)
    assert not ends, "each step has a limit of its own"
    watch.mark("forward")
    assert ended.wait(patience(5))
    assert ends[0].splitlines()[-1].startswith("error: no progress in step 9 for 0.01 minutes")
    assert "step 9, forward for" in ends[0]
    watch.leave()


def test_a_rank_alone_needs_no_store() -> None:
    watch, ends = Watchdog(), list[str]()
    watch.end = ends.append
    watch.begin({}, 0, 1, 0.3)
    for step in range(3):
        watch.enter("step", step)
    time.sleep(1)
    watch.leave()
    assert not ends


def test_one_rank_prints_the_hang_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_tp.process.watch.ANSWER_SECONDS", 1.0)
    store = dist.HashStore()
    members = [Member(store, rank, 3, None, save=1.0) for rank in range(3)]
    wait_until(lambda: all(member.ends for member in members), 20, "not all have ended", 0.05)
    [text] = [text for member in members for text in member.ends if text]
    assert [line.split(" (")[0] for line in text.splitlines()[:-1]] == ["rank 0", "rank 1", "rank 2"]


def test_the_flight_recorder_dumps_where_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _dump_flight_recorder(3) == []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert _dump_flight_recorder(3) == []
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda: b"trace", raising=False)
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace_"))
    assert _dump_flight_recorder(3) == [f"the flight recorder of rank 3 is in {tmp_path}/trace_3"]
    assert (tmp_path / "trace_3").read_bytes() == b"trace"
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "none" / "trace_"))
    assert _dump_flight_recorder(3)[0].endswith("(No such file or directory)")


def test_collectives_of_gloo_and_nccl_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each library's recorder has its own collectives."""
    gloo = '{"pg_status": {"0": {"last_enqueued_collective": 3, "last_completed_collective": 2}}}'
    nccl = '{"pg_status": {"1": {"last_enqueued_collective": 7, "last_completed_collective": 7}}}'
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace_json", lambda _: gloo)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda _: "{}", raising=False)
    assert collective_progress(["world"]) == "world 3/2"
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda _: nccl)
    assert collective_progress(["world", "TP"]) == "world 3/2, TP 7/7"
