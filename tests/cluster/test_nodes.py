"""The nodes that the other tests of a cluster run on, and that nothing is left of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.nodes import Rack
from tests.cluster.slurm import VARIABLES
from tests.launched import ROOT
from tests.waits import wait_until
from zero_tp.process.environment import is_alive

pytestmark = pytest.mark.cluster


def test_nodes_have_their_own_of_everything_but_srv(rack: Rack) -> None:
    second = rack.nodes[1]
    for node in rack.nodes:
        for directory in ("/tmp", "/root", "/srv"):
            (node.seen(Path(directory)) / "either").write_text(node.name)
        assert node.run("bash", "-c", "hostname; hostname -I").stdout.split() == [node.name, node.address]
    for node in rack.nodes:
        assert node.run("cat", "/tmp/either", "/root/either", "/srv/either").stdout == node.name * 2 + second.name
    assert not any(Path(directory, "either").exists() for directory in ("/tmp", "/root", "/srv"))


def test_nodes_reach_each_other(rack: Rack) -> None:
    first, second = rack.nodes
    assert first.run("ssh", second.name, "hostname; hostname -I").stdout.split() == [second.name, second.address]
    told = first.run("pdsh", "-R", "ssh", "-w", "node[1-2]", "hostname").stdout
    assert sorted(told.splitlines()) == ["node1: node1", "node2: node2"]


def test_slurm_starts_tasks_on_both(slurm: Rack) -> None:
    told = slurm.nodes[0].run("srun", "-N2", "--ntasks-per-node=2", "hostname", variables=VARIABLES).stdout.split()
    assert sorted(told) == ["node1", "node1", "node2", "node2"]


def test_a_rack_goes_with_the_process_that_made_it(tmp_path: Path) -> None:
    """Killed, it can clean nothing up itself."""
    making = (
        "import time\nfrom tests.cluster.nodes import Rack\nfrom tests.cluster import slurm\n"
        "rack = Rack(2)\nfor node in rack.nodes: node.serve_ssh()\nslurm.start(rack)\n"
        "print('made', flush=True)\ntime.sleep(600)"
    )
    devices, mounts = psutil.net_if_addrs().keys(), Path("/proc/mounts").read_text()
    maker = subprocess.Popen([sys.executable, "-c", making], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "made\n"
    inside = psutil.Process(maker.pid).children(recursive=True)
    daemons = {process.name() for process in inside}
    assert {"sshd", "slurmd", "munged", "slurmctld", "sleep"} <= daemons, daemons
    assert psutil.net_if_addrs().keys() == devices
    maker.kill()
    maker.wait()
    wait_until(lambda: not any(is_alive(process) for process in inside), 10, str(inside), 0.05)
    assert psutil.net_if_addrs().keys() == devices
    assert Path("/proc/mounts").read_text() == mounts
