"""How a run on two machines ends: one of them says why, and no rank is left on any."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import Rack
from tests.cluster.starts import STARTS, Ended
from tests.waits import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ENDED = ("deepspeed, pdsh", "deepspeed, no ssh", "torchrun", "srun")
"""accelerate's ranks are torchrun's, and sbatch's are srun's."""


@pytest.fixture(autouse=True)
def none_left(slurm: Rack) -> Iterator[None]:
    yield
    wait_until(lambda: not any(node.pids("pretrain.py") for node in slurm.nodes), 30, "processes are left", 0.2)


def say_once(ended: Ended, text: str) -> None:
    told = [line for line in ended.output.splitlines() if text in line]
    assert len(told) == 1, ended.output
    assert "Traceback (most recent call last)" not in told[0]


@pytest.mark.parametrize("name", ENDED)
def test_a_mistake_in_the_file_is_told_once(name: str, slurm: Rack, workplace: Path) -> None:
    ended = STARTS[name](slurm, "--deepspeed_config", "small.json", "--set", "zero_tp.parallel.tensr=2").ended()
    assert 0 not in ended.statuses
    say_once(ended, "node1: error: zero_tp.parallel.tensr: ")
    assert "node2: error" not in ended.output.replace("node2: node1: error", "")
