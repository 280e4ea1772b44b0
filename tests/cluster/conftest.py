"""Fixtures: `rack`, two nodes that let each other in by ssh and share /srv, and `slurm`, the same under Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm as daemons
from tests.cluster.nodes import Rack
from tests.cluster.starts import workplace as furnished


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave these tests out of `-m heavy`, which needs no root: those that are heavy are run by `cluster and heavy`."""
    if "cluster" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("cluster")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


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
