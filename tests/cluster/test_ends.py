"""How a run on two machines ends: one of them prints the reason, and no rank is left on any."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.runs import LONG, check_printed_once, kill_all, process_of, steps, trained
from tests.cluster.starts import STARTS, Start, sbatch, srun, torchrun
from tests.support.launched import ROOT
from tests.support.waits import wait_until
from zero_tp.run.checkpoint.directory import complete_steps
from zero_tp.run.process.environment import is_alive

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

PROMISE_RANK = str(ROOT / "tests/support/promise_rank.py")
ENDED = ("deepspeed, pdsh", "deepspeed, no ssh", "torchrun", "srun")
"""accelerate's ranks are torchrun's, and sbatch's are srun's."""
by_every_launcher = pytest.mark.parametrize("name", ENDED)


@by_every_launcher
def test_a_mistake_in_the_file_is_printed_once(name: str, slurm: Rack, workplace: Path) -> None:
    ended = STARTS[name](slurm, *LONG, "--set", "zero_tp.parallel.tensr=2").ended()
    assert 0 not in ended.statuses
    check_printed_once(ended, ": error: zero_tp.parallel.tensr: ")


@by_every_launcher
@pytest.mark.parametrize("there", [0, 1])
def test_a_corpus_that_one_machine_lacks_is_printed_with_its_name(
    there: int, name: str, slurm: Rack, workplace: Path
) -> None:
    for node in slurm.nodes:
        shutil.rmtree(node.seen(Path("/tmp/data")), ignore_errors=True)
    shutil.copytree(workplace / "data", slurm.nodes[there].seen(Path("/tmp/data")))
    ended = STARTS[name](slurm, *LONG, "--set", "zero_tp.data.train=/tmp/data/train").ended()
    assert 0 not in ended.statuses
    check_printed_once(ended, ": error: ")
    check_printed_once(ended, f"{slurm.nodes[1 - there].name}: error: /tmp/data/train")


@pytest.mark.parametrize("start", [torchrun, srun])
@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("wrong input on one rank", "node1: error: local rank 1 has no device"),
        ("exception", "rank 1 (node1): ArithmeticError: the loss is not finite at step 10"),
    ],
)
def test_wrong_input_or_an_error_of_one_rank_ends_all_machines(
    case: str, line: str, start: Start, slurm: Rack
) -> None:
    ended = start(slurm, "--case", case, program=PROMISE_RANK).ended(90)
    assert 0 not in ended.statuses
    check_printed_once(ended, line)


@by_every_launcher
@pytest.mark.parametrize("killed", [0, 3])
def test_a_rank_that_is_killed_is_named(
    killed: int, name: str, slurm: Rack, workplace: Path
) -> None:
    run = f"runs/killed_{killed}_{ENDED.index(name)}"
    launch = trained(STARTS[name](slurm, *LONG, "--output-dir", run), workplace / run)
    process_of(killed, slurm.nodes[killed // 2]).kill()
    ended = launch.ended()
    assert 0 not in ended.statuses
    check_printed_once(ended, f"error: rank {killed} (node{1 + killed // 2}) ")


@by_every_launcher
def test_ranks_end_with_their_launcher(name: str, slurm: Rack, workplace: Path) -> None:
    """The process above the ranks: DeepSpeed's launch.py, torchrun's agent, or Slurm's
    slurmstepd.
    """
    run = f"runs/launcher_{ENDED.index(name)}"
    trained(STARTS[name](slurm, *LONG, "--output-dir", run), workplace / run)
    ranks = [process_of(rank, slurm.nodes[rank // 2]) for rank in range(4)]
    for launcher in {rank.parent() for rank in ranks}:
        assert launcher is not None
        launcher.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), 20, f"ranks are left: {ranks}", 0.1)
    if name == "srun":  # it waits until Slurm misses the killed daemons
        kill_all(slurm.nodes[0])


@pytest.mark.parametrize("by", ["SIGTERM", "time limit"])
def test_a_signal_or_a_time_limit_saves_on_all(by: str, slurm: Rack, workplace: Path) -> None:
    run = f"runs/stopped_{by.replace(' ', '_')}"
    words = [*LONG, "--output-dir", run]
    if by == "SIGTERM":
        launch = trained(srun(slurm, *words), workplace / run)
        slurm.nodes[0].shell(f"kill -TERM $(cat {SHARED}/{run}/rank0.pid)")
    else:
        launch = trained(
            sbatch(slurm, *words, options=["--time=2", "--signal=TERM@30"]), workplace / run
        )
    ended = launch.ended()
    assert by != "SIGTERM" or ended.statuses == [0], ended.output
    check_printed_once(ended, "stopped after step")
    assert complete_steps(workplace / run) == [steps(workplace / run)], ended.output
