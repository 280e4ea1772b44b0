"""Two launches on one run directory, which machines see late and without common locks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.runs import LONG, check_printed_once, kill_all, steps, trained
from tests.cluster.starts import alone
from tests.support.waits import wait_until
from zero_tp.base.files import NFS_VIEW_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@pytest.fixture
def late(rack: Rack) -> Iterator[Rack]:
    """The second node sees the first one's /srv by the network, as it was up to a minute ago."""
    rack.nodes[1].mount_late(rack.nodes[0], SHARED)
    try:
        yield rack
    finally:
        rack.nodes[1].unmount(SHARED)


def test_a_launch_on_another_machine_takes_the_run_over_and_the_first_one_ends(
    late: Rack, workplace: Path
) -> None:
    first, second = late.nodes
    run = "runs/twice"
    words = [*LONG, "--set", "zero_tp.checkpoint.interval=5", "--output-dir", run]
    assert second.run("ls", run).returncode  # remembered as missing
    try:
        launch = trained(alone(late, *words), workplace / run)
        other = trained(alone(late, *words, node=1), workplace / run)
        ended = launch.ended(2 * NFS_VIEW_SECONDS)
        assert 0 not in ended.statuses
        check_printed_once(ended, "has taken the run over")
        before = steps(workplace / run)
        wait_until(lambda: steps(workplace / run) > before, 30, other.output, 0.1)
    finally:
        kill_all(first)
        kill_all(second)
