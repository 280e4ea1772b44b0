"""How a run on two machines ends: one of them says why, and no rank is left on any."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cluster.nodes import SHARED, Node, Rack
from tests.cluster.slurm import VARIABLES
from tests.cluster.starts import STARTS, Ended, Launch, Start, sbatch, srun, torchrun
from tests.support.launched import ROOT, metrics_of
from tests.support.waits import wait_until
from zero_tp.checkpoint.directory import complete_steps
from zero_tp.process.environment import is_alive

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ENDED = ("deepspeed, pdsh", "deepspeed, no ssh", "torchrun", "srun")
"""accelerate's ranks are torchrun's, and sbatch's are srun's."""
PROMISE_RANK = str(ROOT / "tests/support/promise_rank.py")
LONG = ["--deepspeed_config", "small.json", "--set", "zero_tp.training.steps=100000"]
LONG += ["--set", "zero_tp.checkpoint.interval=null", "--set", "zero_tp.evaluation.interval=null"]


@pytest.fixture(autouse=True)
def none_left(slurm: Rack) -> Iterator[None]:
    yield
    try:
        wait_until(lambda: not any(node.pids("pretrain.py") for node in slurm.nodes), 30, "processes are left", 0.2)
    finally:
        slurm.nodes[0].run("scancel", "--user=root", "--signal=KILL", variables=VARIABLES)
        for node in slurm.nodes:
            kill_all(node)


def steps(run: Path) -> int:
    try:
        return len([line for line in metrics_of(run) if "loss" in line])
    except (FileNotFoundError, ValueError):  # not there, or a line half written
        return 0


def trained(launch: Launch, run: Path) -> Launch:
    """Wait for two steps."""
    wait_until(lambda: steps(run) >= 2 or launch.processes[0].poll() is not None, 120, "it did not train", 0.1)
    assert launch.processes[0].poll() is None, launch.output()
    return launch


def process_of(rank: int, node: Node) -> psutil.Process:
    """The process of a rank, whose first words are Python's and the script's, and not one that it has forked."""
    found = []
    for process in node.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            if any(word.endswith("launch/pretrain.py") for word in process.cmdline()[:3]):
                names = process.environ()
                if names.get("RANK", names.get("SLURM_PROCID")) == str(rank):
                    found.append(process)
    return min(found, key=psutil.Process.create_time)


def kill_all(node: Node, *more: str) -> None:
    """End a node's launcher and ranks; the kernel closes their connections. `more`: and these processes, by name."""
    found = True
    while found:  # a launcher may have started one meanwhile
        found = False
        for process in node.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if any(word.endswith("launch/pretrain.py") for word in process.cmdline()) or process.name() in more:
                    process.kill()
                    found = True


def say_once(ended: Ended, text: str) -> None:
    """Check that one rank has said it; srun tells each machine's statuses by errors of its own."""
    told = [line for line in ended.output.splitlines() if text in line and not line.startswith("srun: error: node")]
    assert len(told) == 1, ended.output
    assert "Traceback (most recent call last)" not in told[0]


@pytest.mark.parametrize("name", ENDED)
def test_a_mistake_in_the_file_is_told_once(name: str, slurm: Rack, workplace: Path) -> None:
    ended = STARTS[name](slurm, *LONG, "--set", "zero_tp.parallel.tensr=2").ended()
    assert 0 not in ended.statuses
    say_once(ended, ": error: zero_tp.parallel.tensr: ")


@pytest.mark.parametrize("name", ENDED)
@pytest.mark.parametrize("there", [0, 1])
def test_a_corpus_that_one_machine_lacks_is_told_with_its_name(
    there: int, name: str, slurm: Rack, workplace: Path
) -> None:
    for node in slurm.nodes:
        shutil.rmtree(node.seen(Path("/tmp/data")), ignore_errors=True)
    shutil.copytree(workplace / "data", slurm.nodes[there].seen(Path("/tmp/data")))
    ended = STARTS[name](slurm, *LONG, "--set", "zero_tp.data.train=/tmp/data/train").ended()
    assert 0 not in ended.statuses
    say_once(ended, ": error: ")
    say_once(ended, f"{slurm.nodes[1 - there].name}: error: /tmp/data/train")


@pytest.mark.parametrize("start", [torchrun, srun])
def test_wrong_input_of_one_rank_ends_all_machines(start: Start, slurm: Rack) -> None:
    ended = start(slurm, "--case", "wrong input on one rank", program=PROMISE_RANK).ended(60)
    assert 0 not in ended.statuses
    say_once(ended, "node1: error: local rank 1 has no device")


@pytest.mark.parametrize("start", [torchrun, srun])
def test_a_failing_rank_prints_its_error(start: Start, slurm: Rack) -> None:
    ended = start(slurm, "--case", "exception", program=PROMISE_RANK).ended(90)
    assert 0 not in ended.statuses
    say_once(ended, "rank 1 (node1): ArithmeticError: the loss is not finite at step 10")


@pytest.mark.parametrize("name", ENDED)
@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_is_killed_is_named(killed: int, name: str, slurm: Rack, workplace: Path) -> None:
    run = f"runs/killed_{killed}_{ENDED.index(name)}"
    launch = trained(STARTS[name](slurm, *LONG, "--output-dir", run), workplace / run)
    process_of(killed, slurm.nodes[killed // 2]).kill()
    ended = launch.ended()
    assert 0 not in ended.statuses
    say_once(ended, f"error: rank {killed} (node{1 + killed // 2}) ")


@pytest.mark.parametrize("name", ENDED)
def test_ranks_end_with_their_launcher(name: str, slurm: Rack, workplace: Path) -> None:
    """The process above the ranks: DeepSpeed's launch.py, torchrun's agent, or Slurm's slurmstepd."""
    run = f"runs/launcher_{ENDED.index(name)}"
    trained(STARTS[name](slurm, *LONG, "--output-dir", run), workplace / run)
    ranks = [process_of(rank, slurm.nodes[rank // 2]) for rank in range(4)]
    for launcher in {rank.parent() for rank in ranks}:
        assert launcher is not None
        launcher.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), 20, f"ranks are left: {ranks}", 0.1)


def test_a_signal_to_a_rank_saves_on_all(slurm: Rack, workplace: Path) -> None:
    launch = trained(srun(slurm, *LONG, "--output-dir", "runs/told"), workplace / "runs/told")
    slurm.nodes[0].shell(f"kill -TERM $(cat {SHARED}/runs/told/rank0.pid)")
    ended = launch.ended()
    assert ended.statuses == [0], ended.output
    say_once(ended, "stopped after step")
    assert complete_steps(workplace / "runs/told")


def ended_by_slurm(launch: Launch) -> Ended:
    wait_until(lambda: launch.processes[0].poll() is not None, 180, "the job goes on", 0.5)
    return launch.ended()


def test_a_time_limit_saves(slurm: Rack, workplace: Path) -> None:
    launch = sbatch(slurm, *LONG, "--output-dir", "runs/limited", options=["--time=2", "--signal=TERM@30"])
    trained(launch, workplace / "runs/limited")
    wait_until(lambda: launch.processes[0].poll() is not None, 180, "the job goes on", 0.5)
    say_once(launch.ended(), "stopped after step")
    assert complete_steps(workplace / "runs/limited") == [steps(workplace / "runs/limited")], launch.output()
