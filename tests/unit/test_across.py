"""A rank's word to the other machines, where the first machine is there, and where it has fallen silent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.waits import wait_until
from zero_tp.process.across import ANSWER_SECONDS, Across
from zero_tp.process.environment import RankEnvironment
from zero_tp.process.lifecycle import _Rank
from zero_tp.process.signals import Requests

STORE = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""


def test_a_store_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a machine without power: its connections are open for ever."""
    first = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", first.stdout.readline().strip())
        environment = RankEnvironment(rank=2, world=4, node=1, local_rank=0, local_world=2, parent=None, job="job")
        across = Across(environment)
        assert across.lost_store() == ""  # it was never found
        across._open(10)
        assert across.lost_store() == ""

        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(first.pid).status() == psutil.STATUS_STOPPED, 10, "it was not stopped", 0.01)
        asked = time.monotonic()
        assert "has lost the ranks' store at 127.0.0.1:" in across.lost_store()
        assert across.claim(1, ANSWER_SECONDS) and not across.ended  # nobody else says why
        assert time.monotonic() - asked < 20

        os.kill(first.pid, signal.SIGCONT)
        assert across.claim(1) and across.ended
    finally:
        first.kill()
        first.wait()


def test_the_store_stays_until_the_other_machines_have_heard_what_another_rank_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int
) -> None:
    """The rank that serves it ends at once then, as the others of its machine do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    job = f"job{seed}"

    def member(rank: int, node: int) -> _Rank:
        environment = RankEnvironment(
            rank=rank, world=3, node=node, local_rank=rank % 2, local_world=2, parent=None, job=job
        )
        return _Rank(environment, False, Requests())

    first, second, far = member(0, 0), member(1, 0), member(2, 1).across
    first.across._open(10)
    assert second._say("error: it failed", 1)
    assert not first.across.ended
    heard: list[float] = []

    def hear() -> None:
        time.sleep(1.5)
        heard.append(time.monotonic())
        far._acknowledge(far._open(10))

    hearing = threading.Thread(target=hear)
    hearing.start()
    first._linger()
    assert heard and time.monotonic() >= heard[0], "the store went before they had heard"
    hearing.join()
