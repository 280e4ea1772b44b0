"""A run's directory has one owner, on whichever machine: neither locks nor an up-to-date view are needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zero_tp.checkpoint import run as runs
from zero_tp.checkpoint.run import Lease
from zero_tp.errors import UserError
from zero_tp.machine import arrives, is_local, started

BEAT = 0.05


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "BEAT_SECONDS", BEAT)
    monkeypatch.setattr(runs, "SILENT_SECONDS", 20.0)  # of an owner that lives nothing is waited for but a touch


def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SILENT_SECONDS", 2 * BEAT)


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is on another machine."""
    monkeypatch.setattr(runs, "this_machine", lambda: "another")


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    with Lease(tmp_path), pytest.raises(UserError, match=rf"writing there \(process {os.getpid()}\)"):
        Lease(tmp_path)
    with Lease(tmp_path):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lease.1", ".lease.2"]


def test_an_owner_on_another_machine_is_seen_by_its_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Lease(tmp_path):
        elsewhere(monkeypatch)
        with pytest.raises(UserError, match="another run is writing there"):
            Lease(tmp_path)
    assert "still lives" in capsys.readouterr().out
    Lease(tmp_path).__exit__()  # given back: at once
    assert capsys.readouterr().out == ""


KILLED = "import sys, os, signal\nfrom pathlib import Path\nfrom zero_tp.checkpoint.run import Lease\n"
KILLED += "Lease(Path(sys.argv[1]))\nos.kill(os.getpid(), signal.SIGKILL)"


def test_the_lease_of_a_killed_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("on its machine nothing is waited for"))
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode < 0
    Lease(tmp_path)._ended.set()  # as if this process were killed
    monkeypatch.undo()
    elsewhere(monkeypatch)
    silent(monkeypatch)
    begun = time.monotonic()
    with Lease(tmp_path):
        assert time.monotonic() - begun > 2 * BEAT
        assert (tmp_path / ".lease.4").is_file()


def test_an_old_view_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that sees neither the newest lease nor that the one before was given back asks for a taken number."""
    for _ in range(2):
        with Lease(tmp_path):
            pass
    with Lease(tmp_path):
        elsewhere(monkeypatch)
        for seen in ([], [1], [2], [1, 2]):
            monkeypatch.setattr(Lease, "_numbers", lambda _, seen=seen: seen)
            with pytest.raises(UserError, match="another run is writing there"):
                Lease(tmp_path)


def test_of_many_that_take_it_over_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent(monkeypatch)
    left = {"machine": "gone", "host": "gone", "pid": 1, "started": "1"}
    (tmp_path / ".lease.7").write_text(json.dumps(left))
    ready = threading.Barrier(8)

    def take(_: int) -> Lease | str:
        ready.wait()
        try:
            return Lease(tmp_path)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(take, range(8)))
    owners = [each for each in taken if isinstance(each, Lease)]
    assert len(owners) == 1 and owners[0]._number == 8
    owners[0].__exit__()


def test_who_was_taken_for_dead_hears_of_it(tmp_path: Path) -> None:
    heard: list[str] = []
    told = threading.Event()

    def lost(text: str) -> None:
        heard.append(text)
        told.set()

    with Lease(tmp_path, lost):
        (tmp_path / ".lease.2").write_text("{}")
        assert told.wait(20)
    assert heard == [f"error: {tmp_path}: another run has taken it, as this one did not answer"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machine": 1, "pid": "x"}', '{"pid": 99999999}', "\0" * 70000])
def test_what_is_no_lease_is_waited_for_and_passed(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that was killed between making the file and writing it."""
    silent(monkeypatch)
    (tmp_path / ".lease.1").write_text(content)
    with Lease(tmp_path):
        assert (tmp_path / ".lease.2").is_file()


def test_leases_of_a_day_ago_go(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        (tmp_path / f".lease.{number}").write_text("{}")
        if number < 3:
            os.utime(tmp_path / f".lease.{number}", (1e9, 1e9))
    with Lease(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lease.3", ".lease.4"]


def test_a_process_is_told_by_its_start() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert started(process.pid) == started(process.pid) != started(os.getpid()) != ""
    finally:
        process.kill()
    while started(process.pid):  # a zombie is gone
        time.sleep(0.01)
    process.wait()
    assert started(process.pid) == ""


def test_only_a_network_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def third() -> bool:
        calls.append(1)
        return len(calls) == 3

    assert is_local(tmp_path)
    assert not arrives(third, tmp_path)
    assert len(calls) == 1
    partition = type("Partition", (), {"mountpoint": "/", "fstype": "nfs4"})
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [partition])
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert not is_local(tmp_path)
    assert arrives(third, tmp_path)
