"""A watchdog ends its rank when a phase makes no progress, or when another rank or the store is silent."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.process.runs import running
from tests.support.pools import Pools
from tests.support.replicas import replica, rows
from tests.support.waits import patience, wait_until
from tests.tiers import THOROUGH
from zero_tp.process.hang_report import RankStatus
from zero_tp.process.watch import Watchdog


class Member:
    """A rank's watchdog that writes to a store in a save after some steps, and why it ends."""

    def __init__(self, store: Any, rank: int, world: int, heartbeat: float | None, **limits: float) -> None:
        self.watch, self.ends = Watchdog(), list[str]()
        self.watch.end = self.ends.append
        self.watch.begin(limits, rank, world, heartbeat)
        for step in range(3):
            self.watch.enter("step", step)
        self.watch.enter("save", 500)
        if store is not None:
            self.watch.connect(store=store)

    def fall_silent(self) -> None:
        """Write the same message again and again: no news, as if the machine's power went."""
        status = RankStatus(phase="save", step=500, host="a", seconds=300.0)
        self.watch._current_status = lambda: status  # type: ignore[method-assign]


def test_no_rank_is_missed_without_a_heartbeat_after_its_end_or_without_a_store() -> None:
    store, other_store = dist.HashStore(), dist.HashStore()
    first, silent = (Member(store, rank, 2, None, step=0.4) for rank in range(2))
    second, ended = (Member(other_store, rank, 2, 0.4) for rank in range(2))
    single = Member(None, 0, 1, 0.3)
    wait_until(lambda: other_store.check(["0", "1"]), 10, "they write nothing", 0.02)
    silent.fall_silent()
    ended.watch.leave()
    assert second.watch._read([1])[1].phase == "end"
    time.sleep(2)
    second.watch.leave()
    single.watch.leave()
    assert not any(member.ends for member in (first, silent, second, single))


class MuteStore:
    """A store that stops to answer while `mute` is set, as that of a machine without power."""

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
    assert "has had no answer from the job's store for 0.05 minutes" in member.ends[0]
    store.mute.clear()


def test_only_a_phase_without_marks_reaches_its_limit() -> None:
    ends, watch = list[str](), Watchdog()
    watch.end = ends.append
    watch.begin({"step": 0.6, "start": None}, 0, 1)
    time.sleep(0.9)
    assert not ends, "a start has no limit here"
    for step in range(10):
        watch.enter("step", step)
        time.sleep(0.1)
    assert not ends, "each step has a limit of its own"
    watch.mark("forward")
    wait_until(lambda: ends, 5, "no limit was reached", 0.02)
    assert ends[0].splitlines()[-1].startswith("error: no progress in step 9 for 0.01 minutes")
    assert "step 9, forward for" in ends[0]
    watch.leave()


# --- real steps ------------------------------------------------------------------------------------------------------


def reports_of_a_hang() -> list[str]:
    """Return what each rank reports when rank 2 stays for long in the forward of its third step."""
    engine, watch, reports = replica(1, tensor=2), Watchdog(), list[str]()
    watch.end = reports.append
    watch.begin({"step": 1.5}, engine.topology.rank, engine.topology.world)
    watch.connect(dist.PrefixStore("watch", dist.distributed_c10d._get_default_store()))
    engine.mark = watch.mark

    def stay(*_: object) -> None:
        wait_until(lambda: reports, 60, "the watchdog saw nothing", 0.05)
        time.sleep(patience(1.0))  # the others come to their limits meanwhile

    for step in (1, 2, 3):
        watch.enter("step", step)
        if step == 3 and engine.topology.rank == 2:
            engine.model.transformer.layers[0].mlp.register_forward_hook(stay)
        engine.train_step(rows(engine, step))
    watch.leave()
    return reports


@THOROUGH
def test_a_rank_that_hangs_is_named_by_one(ranks: Pools) -> None:
    [report] = [report for reports in ranks(4).run(reports_of_a_hang) for report in reports if report]
    *lines, last = report.splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"rank {number}" for number in range(4)]
    assert "in step 3, forward for" in lines[2] and "called by forward (zero_tp/models/" in lines[2]
    assert re.search(r"at .*\(zero_tp/parallel/collectives\.py:", lines[3])
    # Ranks 2 and 3 are a TP group: rank 3 has enqueued the collective that rank 2 does not come to.
    late, waiting = (re.findall(r"group \d+ (\d+)/(\d+)", lines[number]) for number in (2, 3))
    assert late[-1] == waiting[-1] or late[-2] == waiting[-2], "of one of the two groups"
    ahead = [now for before, now in zip(late, waiting, strict=True) if now[0] != before[0]]
    assert ahead and all(int(enqueued) > int(completed) for enqueued, completed in ahead)
    assert last == (
        "error: no progress in step 3 for 0.025 minutes (the limit: zero_tp.training.timeout_minutes): "
        "ranks 0, 1 and 3 wait for rank 2"
    )


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ('{"step": 0.2}', r".* for 0\.2 minutes \(the limit: .*timeout_minutes\): rank 0 waits for rank 1"),
        ('{"heartbeat": 0.5}', r"no heartbeat from rank 1 \(.+\) for 0\.5 minutes \(the limit: .*\.heartbeat\): .*"),
    ],
)
def test_a_run_with_a_stopped_rank_ends_by_its_limit(limits: str, error: str, workplace: Path) -> None:
    name = f"suspended_{re.sub(r'[^a-z]', '', limits)}"
    with running(workplace, name, "deepspeed", f"zero_tp.training.timeout_minutes={limits}") as run:
        run.rank(1).suspend()
        run.launcher.wait(patience(150))
    assert run.launcher.returncode == 1
    text = run.log.read_text()
    [line] = [line for line in run.output() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {error}", line), text
    if "step" in limits:
        positions = r"^rank [01] \(.*; collectives enqueued/completed: world \d+/\d+"
        assert len(re.findall(positions, text, re.MULTILINE)) == 2, text
    assert "Traceback" not in text
