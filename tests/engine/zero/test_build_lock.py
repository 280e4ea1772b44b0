"""Locks of builds in torch's folder of extensions: who waits for one hears of it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from torch.utils.file_baton import FileBaton

from zero_tp.engine import engine
from zero_tp.engine.zero.build_lock import report_build_locks
from zero_tp.run.process import connect


@pytest.fixture(autouse=True)
def wait_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileBaton, "wait", FileBaton.wait)  # undone after the test


def lines_of_a_wait(lock: Path, *, after: float, expected: bool) -> list[str]:
    """What is reported while torch waits for a lock: until the first line if one is expected,
    else for 0.2 s.
    """
    lines: list[str] = []
    reported = threading.Event()

    def write(line: str) -> None:
        lines.append(line)
        reported.set()

    report_build_locks(after, write)
    waiting = threading.Thread(target=FileBaton(str(lock), wait_seconds=0.01).wait)
    waiting.start()
    assert reported.wait(30 if expected else 0.2) == expected
    lock.unlink()
    waiting.join(30)
    assert not waiting.is_alive()
    return lines


def test_a_lock_that_a_killed_build_left_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (line,) = lines_of_a_wait(tmp_path / "lock", after=0.0, expected=True)
    assert line.startswith(
        f"waiting for {tmp_path}/lock: no process of this machine is building there: "
    )
    assert line.endswith("stop this start, remove the lock and start again")


def test_a_build_that_goes_on_has_a_process(tmp_path: Path) -> None:
    builder = FileBaton(str(tmp_path / "lock"))
    assert builder.try_acquire()
    (line,) = lines_of_a_wait(tmp_path / "lock", after=0.0, expected=True)
    os.close(cast(Any, builder).fd)
    assert line.startswith(
        f"waiting for {tmp_path}/lock: process {os.getpid()} is building there; "
    )


@pytest.mark.parametrize(("after", "rank"), [(30.0, "0"), (0.0, "1")])
def test_a_short_wait_and_other_ranks_are_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, rank: str
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    (tmp_path / "lock").touch()
    assert lines_of_a_wait(tmp_path / "lock", after=after, expected=False) == []


def test_torch_waits_for_a_build_by_this_class(tmp_path: Path) -> None:
    """DeepSpeed calls torch's `load`, which waits for the file `lock` by `FileBaton.wait`; from
    2.14 on for no file.
    """
    from torch.utils import cpp_extension

    source = tmp_path / "empty.cpp"
    for file in (source, tmp_path / "lock"):
        file.touch()
    lines: list[str] = []

    def end(line: str) -> None:
        lines.append(line)
        (tmp_path / "lock").unlink()

    report_build_locks(0.0, end)
    with pytest.raises(ImportError):  # nobody has built it, or it has no module
        cpp_extension.load("empty", [str(source)], build_directory=str(tmp_path))
    assert len(lines) == (not hasattr(cpp_extension, "FileLock"))


def test_runs_and_engines_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise InterruptedError

    monkeypatch.setattr(engine, "report_build_locks", fails)
    monkeypatch.setattr(connect, "report_build_locks", fails)
    nothing = cast(Any, None)
    with pytest.raises(InterruptedError):
        engine.TrainingEngine(nothing, nothing, nothing, seed=0)
    config = cast(Any, type("Config", (), {"dtype": "fp32", "nvme_paths": {}}))
    with pytest.raises(InterruptedError):
        connect.connect_deepspeed(config, nothing)
