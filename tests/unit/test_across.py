"""A rank's word to the other machines, where the first machine is there, and where it has fallen silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.waits import wait_until
from zero_tp.process.across import ANSWER_SECONDS, Across
from zero_tp.process.environment import RankEnvironment

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
