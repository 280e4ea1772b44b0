"""Fixtures: `rack`, two nodes that let each other in by ssh and share /srv, and `slurm`, the same under Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster import slurm as daemons
from tests.cluster.nodes import Rack


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
