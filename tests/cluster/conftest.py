"""Fixtures: `rack`, two nodes that let each other in by ssh and share /srv, and `slurm`, the same under Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm as daemons
from tests.cluster.nodes import Rack
from tests.cluster.starts import workplace as furnished


@pytest.fixture(scope="session")
def rack() -> Iterator[Rack]:
    made = Rack(2)
    try:
        for node in made.nodes:
            node.serve_ssh()
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def slurm(rack: Rack) -> Rack:
    daemons.start(rack)
    return rack


@pytest.fixture(scope="session")
def workplace(slurm: Rack) -> Path:
    """The shared directory, with a corpus and a small config, as this process names it."""
    return furnished(slurm)
