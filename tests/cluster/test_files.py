"""Two launches on one run directory, which machines see late and without common locks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Node, Rack
from tests.cluster.starts import alone
from tests.cluster.test_ends import LONG, kill_all, say_once, steps, trained
from tests.support.waits import patience, wait_until
from zero_tp.files import VIEW_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

HOLD = """
import sys
from pathlib import Path
from zero_tp.checkpoint.run_directory import run_directory
from zero_tp.errors import UserError
try:
    with run_directory(Path(sys.argv[1])) as owner:
        print("held", flush=True)
        sys.stdin.readline()
        owner.check()
        print("still held")
except UserError as error:
    print(error)
"""


def hold(node: Node, run: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, f"{SHARED}/{run}"]
    return node.start(*words, output=subprocess.PIPE, given=subprocess.PIPE)


def last_line(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate("\n", timeout=patience(2 * VIEW_SECONDS))
    return str(told.splitlines()[-1])


@pytest.fixture
def late(rack: Rack) -> Iterator[Rack]:
    """The second node sees the first one's /srv by the network, as it was up to a minute ago."""
    rack.nodes[1].mount_late(rack.nodes[0], SHARED)
    try:
        yield rack
    finally:
        rack.nodes[1].unmount(SHARED)


def test_a_second_launch_is_refused_on_its_machine_and_takes_the_run_over_on_another(rack: Rack) -> None:
    first, second = rack.nodes
    holder = hold(first, "held")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert f"{SHARED}/held: another run is writing there" in last_line(hold(first, "held"))
    assert last_line(hold(second, "held")) == "still held"
    assert f"on {second.name}) has taken the run over" in last_line(holder)


def test_a_launch_on_another_machine_takes_the_run_over_and_the_first_one_ends(late: Rack, workplace: Path) -> None:
    first, second = late.nodes
    run = "runs/twice"
    assert second.run("ls", run).returncode  # remembered as missing
    try:
        launch = trained(alone(late, *LONG, "--output-dir", run), workplace / run)
        other = trained(alone(late, *LONG, "--output-dir", run, node=1), workplace / run)
        ended = launch.ended(patience(2 * VIEW_SECONDS))
        assert 0 not in ended.statuses
        say_once(ended, "has taken the run over")
        before = steps(workplace / run)
        wait_until(lambda: steps(workplace / run) > before, 30, other.output, 0.1)
    finally:
        kill_all(first)
        kill_all(second)
