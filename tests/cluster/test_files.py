"""Run directories that machines see late, without common locks, or each by itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Node, Rack
from tests.cluster.starts import alone, torchrun
from tests.cluster.test_ends import LONG, kill_all, say_once, steps, trained
from tests.cluster.test_starting import losses
from tests.waits import patience, wait_until
from zero_tp.checkpoint.run import SILENT_SECONDS
from zero_tp.machine import VIEW_SECONDS

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

HOLD = """
import fcntl, sys, time
from pathlib import Path
if sys.argv[2] == "without locks":
    fcntl.flock = lambda file, kind: None
from zero_tp.checkpoint.run import run_directory
from zero_tp.errors import UserError
try:
    with run_directory(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(float(sys.argv[3]))
except UserError as error:
    print(error)
"""


def hold(node: Node, run: str, locks: str, seconds: float = 600) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLD, f"{SHARED}/{run}", locks, str(seconds)]
    return node.start(*words, output=subprocess.PIPE)


def last_line(process: subprocess.Popen[str]) -> str:
    told, _ = process.communicate(timeout=patience(2 * (VIEW_SECONDS + SILENT_SECONDS)))
    return str(told.splitlines()[-1])


@pytest.fixture
def late(rack: Rack) -> Iterator[Rack]:
    """The second node sees the first one's /srv by the network, as it was up to a minute ago."""
    rack.nodes[1].mount_late(rack.nodes[0], SHARED)
    try:
        yield rack
    finally:
        rack.nodes[1].unmount(SHARED)


@pytest.mark.parametrize("locks", ["with locks", "without locks"])
def test_a_second_launch_is_refused_on_the_same_and_on_another_machine(rack: Rack, locks: str) -> None:
    first, second = rack.nodes
    run = f"held_{locks.replace(' ', '_')}"
    holder = hold(first, run, locks)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    for node in (first, second):
        assert f"{SHARED}/{run}: another run is writing there" in last_line(hold(node, run, locks, 0))
    holder.kill()


@pytest.mark.parametrize(("server_first", "locks"), [(True, "with locks"), (False, "without locks")])
def test_a_second_launch_is_refused_where_the_view_lags(late: Rack, server_first: bool, locks: str) -> None:
    """sshfs shares no locks, and shows attributes and names, missing ones too, for a minute."""
    owner, other = late.nodes if server_first else reversed(late.nodes)
    run = f"late_{server_first}"
    assert other.run("ls", run).returncode  # remembered as missing
    holder = hold(owner, run, locks)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    assert "another run is writing there (" + owner.name in last_line(hold(other, run, locks, 0))
    owner.run("pkill", "-KILL", "-f", f"{SHARED}/{run}")
    begun = time.monotonic()
    assert last_line(hold(other, run, locks, 0)) == "held"
    assert time.monotonic() - begun > SILENT_SECONDS
    begun = time.monotonic()
    assert last_line(hold(owner, run, locks, 0)) == "held"  # given back
    assert time.monotonic() - begun < SILENT_SECONDS


def test_a_second_launch_of_ranks_is_refused_without_locks_where_the_view_lags(late: Rack, workplace: Path) -> None:
    first, second = late.nodes
    (workplace / "flock.c").write_text("int flock(int file, int operation) { return 0; }\n")
    first.shell(f"cc -shared -fPIC -o {SHARED}/flock.so {SHARED}/flock.c")
    variables, run = {"LD_PRELOAD": f"{SHARED}/flock.so"}, "runs/twice"
    assert second.run("ls", run).returncode  # remembered as missing
    try:
        launch = trained(alone(late, *LONG, "--output-dir", run, variables=variables), workplace / run)
        ended = alone(late, *LONG, "--output-dir", run, node=1, variables=variables).ended()
        assert 0 not in ended.statuses
        say_once(ended, f"{run}: another run is writing there (node1)")
        before = steps(workplace / run)
        wait_until(lambda: steps(workplace / run) > before, 30, launch.output, 0.1)
    finally:
        kill_all(first)


def test_a_run_on_a_view_that_lags_is_the_same_run(late: Rack, workplace: Path) -> None:
    """It saves every other step, seconds apart, and goes on from its checkpoints."""
    words = ["--deepspeed_config", "small.json", "--set", "zero_tp.checkpoint.interval=2", "--output-dir"]
    assert alone(late, *words, "runs/late_alone").ended().statuses == [0]
    for last in (4, 8):
        ended = torchrun(late, *words, "runs/late", "--set", f"zero_tp.training.steps={last}").ended(300)
        assert ended.statuses == [0, 0], ended.output
    assert losses(workplace / "runs/late") == losses(workplace / "runs/late_alone")
    assert (workplace / "runs/late/checkpoints/latest").read_text() == "step_00000008\n"


def test_a_run_directory_of_each_machine_is_refused(rack: Rack, workplace: Path) -> None:
    ended = torchrun(rack, "--deepspeed_config", "small.json", "--output-dir", "/tmp/run").ended()
    assert 0 not in ended.statuses
    told = [line for line in ended.output.splitlines() if "/tmp/run: the ranks do not see the same directory" in line]
    assert len(told) == 1, ended.output
    assert "nothing on ranks" in told[0] and "put it on storage that all nodes share" in told[0]
    wait_until(lambda: not any(node.pids("pretrain.py") for node in rack.nodes), 30, "ranks are left", 0.2)
