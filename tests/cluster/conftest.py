"""Fixtures: `rack`, two nodes that let each other in by ssh and share /srv, and `slurm`, the
same under Slurm.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm as daemons
from tests.cluster.nodes import Rack
from tests.cluster.runs import kill_all
from tests.cluster.slurm import VARIABLES
from tests.cluster.starts import workplace as furnished
from tests.support.waits import wait_until


@pytest.fixture(scope="session")
def rack() -> Iterator[Rack]:
    two_nodes = Rack(2)
    try:
        for node in two_nodes.nodes:
            node.serve_ssh()
        yield two_nodes
    finally:
        two_nodes.close()


@pytest.fixture(scope="session")
def slurm(rack: Rack) -> Rack:
    daemons.start(rack)
    return rack


@pytest.fixture(scope="session")
def workplace(slurm: Rack) -> Path:
    """The shared directory, with a corpus and a small config, as this process names it."""
    return furnished(slurm)


@pytest.fixture(autouse=True)
def none_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test on the nodes ends without ranks on any of them; Ray's needs no node."""
    if not {"rack", "slurm", "workplace"} & {*request.fixturenames}:
        yield
        return
    slurm: Rack = request.getfixturevalue("slurm")
    yield
    try:
        wait_until(
            lambda: not any(node.pids("pretrain.py") for node in slurm.nodes),
            30,
            "processes are left",
            0.2,
        )
    finally:
        slurm.nodes[0].run("scancel", "--user=root", "--signal=KILL", variables=VARIABLES)
        for node in slurm.nodes:
            kill_all(node)
