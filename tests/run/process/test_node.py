"""The ranks of one machine watch each other: the lowest that is left reports one that was
killed.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.waits import wait_until
from zero_tp.run.process.environment import RankEnvironment
from zero_tp.run.process.node import NodeWatch

HOST = socket.gethostname()
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_a_killed_rank_is_reported_by_the_lowest_that_is_left(
    capfd: pytest.CaptureFixture[str],
) -> None:
    ranks = [subprocess.Popen(SLEEP, env={"RANK": str(rank)}) for rank in range(4, 8)]
    deepspeed_ends: list[str] = []

    def watch(rank: int) -> NodeWatch:
        environment = RankEnvironment(rank, 8, rank - 4, 4, parent=psutil.Process())
        return NodeWatch(environment, lambda: deepspeed_ends.append("ended"))

    try:
        lowest, other = watch(4), watch(5)
        for node in (lowest, other):
            node.start()
        wait_until(
            lambda: lowest.all_running() and other.all_running(),
            20,
            "the ranks were not found",
            0.02,
        )
        ranks[2].kill()
        wait_until(
            lambda: lowest.exit_statuses() and other.exit_statuses(),
            10,
            "the killed one was not missed",
            0.02,
        )
        assert lowest.exit_statuses() == {6: -9} and not lowest.all_running()
        ranks[3].terminate()  # by its launcher
        wait_until(lambda: 7 in lowest.exit_statuses(), 10, "the other was not missed", 0.02)
        time.sleep(0.3)
        for node in (lowest, other):
            node.report_killed(include_unknown=True)
        assert (
            capfd.readouterr().err
            == f"error: rank 6 ({HOST}) was killed by SIGKILL; out of memory?\n"
        )
        assert not deepspeed_ends
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_with_unknown_status_is_reported_unless_torchruns_error_file_exists(
    failed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    rank = subprocess.Popen(SLEEP, env={"RANK": "1", "TORCHELASTIC_ERROR_FILE": str(file)})
    watch = NodeWatch(RankEnvironment(0, 2, 0, 2, parent=psutil.Process()), lambda: None)
    wait_until(watch._find_ranks, 20, "the rank was not found", 0.02)
    if failed:
        file.touch()
    rank.kill()
    rank.wait()  # its launcher has reaped it
    assert watch.exit_statuses() == {1: 1 if failed else None}
    watch.report_killed()
    assert capfd.readouterr().err == ""
    watch.report_killed(include_unknown=True)
    line = (
        f"error: rank 1 ({HOST}) has ended; if it printed no error, it was killed (out of "
        "memory?)\n"
    )
    assert capfd.readouterr().err == ("" if failed else line)
