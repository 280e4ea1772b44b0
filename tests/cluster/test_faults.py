"""A rank or a link that stops while a run trains: the run ends in a bounded time and says who waits for whom."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.nodes import Rack
from tests.cluster.starts import Ended, torchrun
from tests.cluster.test_ends import LONG, none_left, process_of, say_once, trained
from tests.waits import patience

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
__all__ = ["none_left"]

LIMIT = 15
LIMITED = [*LONG, "--set", f'zero_tp.training.timeout_minutes={{"step": {LIMIT / 60}}}']
FOUND = LIMIT + 35
"""Seconds of an idle machine from a fault to the end of all ranks: the limit, the store's answers, and the way out."""


def hangs(ended: Ended, waiting: str) -> None:
    assert 0 not in ended.statuses
    say_once(ended, "error: no progress in step")
    say_once(ended, f"by zero_tp.training.timeout_minutes: {waiting}")


def test_a_rank_that_is_stopped_is_named(slurm: Rack, workplace: Path) -> None:
    run = "runs/stopped"
    launch = trained(torchrun(slurm, *LIMITED, "--output-dir", run), workplace / run)
    begun = time.monotonic()
    process_of(3, slurm.nodes[1]).suspend()
    ended = launch.ended()
    hangs(ended, "ranks 0, 1 and 2 wait for rank 3")
    assert "rank 3 (node2) in step" in ended.output
    assert time.monotonic() - begun < patience(FOUND + 35), "the launcher waits for 30 s before it kills"


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
