"""A monitor that hangs, fails or is not there costs its own lines, and a person one line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_monitors import config_of
from zero_tp.errors import ConfigError
from zero_tp.monitors import feed
from zero_tp.monitors.feed import Monitors
from zero_tp.monitors.sinks import check_installed


class Hanging:
    """A service that never answers."""

    def __init__(self, listener: socket.socket) -> None:
        self.address = listener.getsockname()

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        with socket.create_connection(self.address) as asked:
            asked.recv(1)

    def finish(self) -> None: ...


class Taking:
    def __init__(self) -> None:
        self.taken: list[tuple[int | None, dict[str, Any]]] = []

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        if values["loss"] == 2.0:
            raise RuntimeError("the service is gone\x1b\nfor ever")
        self.taken.append((step, values))

    def finish(self) -> None:
        self.taken.append((None, {}))


def test_a_service_that_hangs_or_fails_costs_its_own_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(feed, "LEAVE_SECONDS", 0.5)
    monkeypatch.setattr(feed, "MOST_WAITING", 3)

    def never_opened() -> Taking:
        raise SystemExit("no key")

    sound = Taking()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened: dict[str, Callable[[], Any]] = {
            "hangs": lambda: Hanging(listener),
            "fails": lambda: sound,
            "closed": never_opened,
        }
        monitors = Monitors(opened)
        began, told = time.monotonic(), []
        for step in range(1, 7):
            monitors.write({"step": step, "loss": float(step)})
            time.sleep(0.03)
            told += list(monitors.notes())
        told += list(monitors.close(failing=False))
        assert time.monotonic() - began < 30
    assert [step for step, _ in sound.taken] == [1, 3, 4, 5, 6, None]
    assert told.count("fails: did not take what was logged (the service is gone\\x1b); the run goes on") == 1
    assert "fails: 1 line was lost" in told and "closed: 6 lines were lost" in told
    assert "closed: could not be opened (no key); the run goes on" in told
    about = [line for line in told if line.startswith("hangs: ")]
    assert about[0] == "hangs: no answer for 0 s; the run goes on"
    assert about[1] == "hangs: 3 lines wait for it; the run goes on without the next ones"
    assert "it is left behind" in about[2] and about[3] == "hangs: 6 lines were lost"


def test_one_that_is_behind_when_the_run_ends_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MOST_WAITING", 2)
    asked, answers, sound = threading.Event(), threading.Event(), Taking()

    class Late:
        def log(self, values: dict[str, Any], step: int | None = None) -> None:
            asked.set()
            answers.wait(60)
            sound.log(values, step)

        finish = sound.finish

    monitors = Monitors({"late": Late})
    monitors.write({"step": 1, "loss": 1.0})
    asked.wait(60)
    for step in (3, 4, 5):
        monitors.write({"step": step, "loss": 1.0})
    threading.Timer(0.05, answers.set).start()
    waits = "late: 2 lines wait for it; the run goes on without the next ones"
    assert list(monitors.close(failing=False)) == [waits, "late: 1 line was lost"]
    assert [step for step, _ in sound.taken] == [1, 3, 4, None]


def test_a_failing_run_does_not_wait_for_its_monitors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "FAILED_LEAVE_SECONDS", 0.05)
    opened = threading.Event()

    def late() -> Taking:
        opened.wait(60)
        return Taking()

    monitors = Monitors({"slow": late})
    began = time.monotonic()
    assert list(monitors.close(failing=True)) == ["slow: not done 0 s after the run; it is left behind"]
    assert time.monotonic() - began < feed.LEAVE_SECONDS
    opened.set()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("wandb.enabled=true", "wandb: the package wandb is not installed; pip install wandb"),
        ('zero_tp.logging.trackers=["aim"]', "zero_tp.logging.trackers.aim: the package aim is not installed"),
        ('zero_tp.logging.trackers=["wandb"]', 'has a block of its own: write "wandb": {"enabled": true}'),
        ('zero_tp.logging.trackers={"mlfow": {}}', 'did you mean "mlflow"?'),
    ],
)
def test_a_monitor_that_cannot_be_is_one_line(
    tmp_path: Path, override: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_tp.monitors.sinks.find_spec", lambda package: None)
    with pytest.raises(ConfigError) as refused:
        check_installed(config_of(tmp_path, override))
    assert told in str(refused.value) and "\n" not in str(refused.value)
