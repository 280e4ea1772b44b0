"""A watchdog ends its rank when a phase makes no progress, or when another rank or the store is
silent.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.run.process.runs import running
from tests.support.waits import patience, wait_until
from tests.tiers import THOROUGH
from zero_tp.run.process import watch
from zero_tp.run.process.hang_report import RankStatus
from zero_tp.run.process.watch import Watchdog


class Member:
    """A rank's watchdog that writes to a store in a save after some steps, and why it ends."""

    def __init__(
        self, store: Any, rank: int, world: int, heartbeat: float | None, **limits: float
    ) -> None:
        self.watch, self.ends = Watchdog(), list[str]()
        self.watch.on_end = self.ends.append
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


@THOROUGH
def test_a_store_that_does_not_answer_ends_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 1.0)
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
    watch.on_end = ends.append
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


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (
            '{"step": 0.2}',
            r".* for 0\.2 minutes \(the limit: .*timeout_minutes\): rank 0 waits for rank 1",
        ),
        (
            '{"heartbeat": 0.5}',
            r"no heartbeat from rank 1 \(.+\) for 0\.5 minutes \(the limit: .*\.heartbeat\): .*",
        ),
    ],
)
def test_a_run_with_a_stopped_rank_ends_by_its_limit(
    limits: str, error: str, workplace: Path
) -> None:
    name = f"suspended_{re.sub(r'[^a-z]', '', limits)}"
    with running(workplace, name, "deepspeed", f"zero_tp.training.timeout_minutes={limits}") as run:
        run.rank(1).suspend()
        run.launcher.wait(patience(150))
    assert run.launcher.returncode == 1
    text = run.log.read_text()
    [line] = [line for line in run.output() if line.startswith("error: ")]
    assert re.fullmatch(f"error: {error}", line), text
    if "step" in limits:
        [position] = re.findall(r"^rank 0 \(.*\) in (.*)", text, re.MULTILINE)
        assert re.fullmatch(
            r"step \d+, (forward|backward|update) for \d+ s, at .*\(zero_tp/.*\)", position
        ), text
    assert "Traceback" not in text
