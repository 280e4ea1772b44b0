"""A machine that dies or falls silent while a run trains: the others end in a bounded time and say why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.nodes import Rack
from tests.cluster.starts import Ended, torchrun
from tests.cluster.test_ends import LONG, kill_all, none_left, say_once, trained
from tests.support.waits import patience

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
__all__ = ["none_left"]

LIMIT = 15
LIMITED = [*LONG, "--set", f'zero_tp.training.timeout_minutes={{"step": {LIMIT / 60}}}']
FOUND = LIMIT + 35
"""Seconds of an idle machine from a fault to the end of all ranks: the limit, the store's answers, and the way out."""


def hangs(ended: Ended, waiting: str) -> None:
    assert 0 not in ended.statuses
    say_once(ended, "error: no progress in step")
    say_once(ended, f"by zero_tp.training.timeout_minutes: {waiting}")


def test_a_link_that_is_down_is_found(slurm: Rack, workplace: Path) -> None:
    launch = trained(torchrun(slurm, *LIMITED, "--output-dir", "runs/unplugged"), workplace / "runs/unplugged")
    begun = time.monotonic()
    slurm.shell("ip link set node2 down")
    try:
        status = launch.processes[0].wait(patience(180))
        found = time.monotonic() - begun
    finally:
        slurm.shell("ip link set node2 up")
    launch.ended()
    hangs(Ended([status], launch.output(0)), "ranks 0 and 1 wait for ranks 2 and 3")
    assert found < patience(FOUND)
    assert "error: no progress in step" in launch.output(1), "which cannot know what the first machine says"


def test_the_end_of_the_first_machine_ends_the_others(slurm: Rack, workplace: Path) -> None:
    launch = trained(torchrun(slurm, *LIMITED, "--output-dir", "runs/headless"), workplace / "runs/headless")
    begun = time.monotonic()
    kill_all(slurm.nodes[0])
    ended = launch.ended()
    assert time.monotonic() - begun < patience(FOUND)
    assert 0 not in ended.statuses
