"""A tracker that hangs, fails or is not installed loses its own values, and a person reads one
line.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitor_runs import config_of, start_state
from zero_tp.base.errors import ConfigError
from zero_tp.tools.monitors import trackers as callback
from zero_tp.tools.monitors.csv_files import CsvFiles
from zero_tp.tools.monitors.run_info import RunInfo
from zero_tp.tools.monitors.trackers import Trackers, check_installed


class Recording:
    """A tracker whose service refuses the loss 2.0 and the loss 4.0."""

    def __init__(self) -> None:
        self.logged: list[int | None] = []

    def log(self, values: dict[str, float], step: int) -> None:
        if values["loss"] in (2.0, 4.0):
            raise RuntimeError(f"the service is gone at {step}\x1b\nfor ever")
        self.logged.append(step)

    def finish(self) -> None:
        self.logged.append(None)


class Hanging(Recording):
    """A tracker whose service answers nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.released = threading.Event(), threading.Event()

    def log(self, values: dict[str, float], step: int) -> None:
        self.asked.set()
        self.released.wait(60)
        super().log(values, step)


def start(
    trackers: Mapping[str, Callable[[], Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Trackers, Any]:
    """Start a run that has these trackers."""
    chosen = {key: (None, lambda run, make=make: make()) for key, make in trackers.items()}
    monkeypatch.setattr(callback, "trackers_of", lambda config: chosen)
    state, of_run = start_state(config_of(tmp_path), tmp_path / "run"), Trackers()
    of_run.on_start(state)
    return of_run, state


def test_a_service_that_hangs_or_fails_loses_only_its_own_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "CLOSE_SECONDS", 0.5)

    def refused() -> Recording:
        raise SystemExit("no key")

    sound, hanging = Recording(), Hanging()
    trackers, state = start(
        {"hangs": lambda: hanging, "fails": lambda: sound, "closed": refused}, tmp_path, monkeypatch
    )
    began = time.monotonic()
    for step in range(1, 7):
        trackers.on_log(state, {"step": step, "loss": float(step), "mfu": None})
    trackers.on_end(state)
    assert time.monotonic() - began < 30
    hanging.released.set()
    assert sound.logged == [1, 3, 5, 6, None]
    assert sorted(state.printed) == [
        "closed failed (no key); training continues",
        "fails failed (the service is gone at 2\\x1b); training continues",
        "hangs: not done 0 s after the run; its last values are lost",
    ]


def test_a_failure_is_reported_while_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers, state = start({"fails": Recording}, tmp_path, monkeypatch)
    deadline = time.monotonic() + 60
    while not state.printed and time.monotonic() < deadline:
        trackers.on_log(state, {"step": 2, "loss": 2.0})
        time.sleep(0.01)
    assert state.printed == ["fails failed (the service is gone at 2\\x1b); training continues"]
    trackers.on_end(state)
    assert len(state.printed) == 1


def test_a_tracker_that_could_not_be_opened_gets_no_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trackers, state = start({"fails": lambda: dict[str, Any]()["absent"]}, tmp_path, monkeypatch)
    (thread,) = trackers._threads
    thread.join(60)
    trackers.on_log(state, {"step": 1, "loss": 1.0})
    assert thread.queue.empty() and len(state.printed) == 1


def test_a_tracker_that_does_not_open_holds_few_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "MAX_QUEUED", 2)
    sound, released = Recording(), threading.Event()

    def late() -> Recording:
        released.wait(60)
        return sound

    trackers, state = start({"slow": late}, tmp_path, monkeypatch)
    for step in (1, 3, 5, 6):
        trackers.on_log(state, {"step": step, "loss": 1.0})
    assert trackers._threads[0].queue.qsize() == 2
    assert state.printed == [
        "slow does not answer: values are lost from step 5 on; training continues"
    ]
    released.set()
    trackers.on_end(state)
    assert sound.logged == [1, 3, None] and len(state.printed) == 1


def test_a_tracker_that_is_behind_when_the_run_ends_gets_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Hanging()
    trackers, state = start({"late": lambda: late}, tmp_path, monkeypatch)
    for step in (1, 3, 5):
        trackers.on_log(state, {"step": step, "loss": 1.0})
    assert late.asked.wait(60)
    threading.Timer(0.05, late.released.set).start()
    trackers.on_end(state)
    assert state.printed == [] and late.logged == [1, 3, 5, None]


def test_a_failing_run_does_not_wait_for_its_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callback, "CLOSE_SECONDS_AFTER_ERROR", 0.05)
    released = threading.Event()

    def late() -> Recording:
        released.wait(60)
        return Recording()

    trackers, state = start({"slow": late}, tmp_path, monkeypatch)
    began, state.error = time.monotonic(), RuntimeError()
    trackers.on_end(state)
    assert state.printed == ["slow: not done 0 s after the run; its last values are lost"]
    assert time.monotonic() - began < callback.CLOSE_SECONDS
    released.set()


def test_a_full_disk_leaves_whole_lines_in_csv_files(tmp_path: Path) -> None:
    files, limits = (
        CsvFiles({}, RunInfo(tmp_path, config_of(tmp_path), 0)),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    written = files.directory / "loss.csv"
    for values in ({"loss": 0.125}, {"loss": 0.25}):
        # The header and half of the line.
        resource.setrlimit(resource.RLIMIT_FSIZE, (14, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                files.log(values, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        files.log(values, 1)
    assert written.read_text() == "step,loss\n1,0.125\n1,0.25\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("wandb.enabled=true", "wandb: the package wandb is not installed; pip install wandb"),
        (
            'zero_tp.logging.trackers=["aim"]',
            "zero_tp.logging.trackers.aim: the package aim is not installed",
        ),
        (
            'zero_tp.logging.trackers=["wandb"]',
            'has a block of its own: write "wandb": {"enabled": true}',
        ),
        ('zero_tp.logging.trackers={"mlfow": {}}', 'did you mean "mlflow"?'),
    ],
)
def test_a_tracker_that_is_not_installed_is_one_line(
    tmp_path: Path, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zero_tp.tools.monitors.trackers.find_spec", lambda package: None)
    with pytest.raises(ConfigError) as refused:
        check_installed(config_of(tmp_path, override))
    assert message in str(refused.value) and "\n" not in str(refused.value)
