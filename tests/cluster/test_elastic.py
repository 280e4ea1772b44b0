"""A run that loses a machine goes on with those that are left, from its last checkpoint, and takes the machine back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.slurm import VARIABLES, serve
from tests.cluster.starts import Launch, agent, alone, sbatch
from tests.cluster.test_ends import kill_all, none_left, steps, trained
from tests.cluster.test_starting import losses
from tests.support.launched import free_port
from tests.support.waits import wait_until
from zero_tp.checkpoint.directory import complete_steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
__all__ = ["none_left"]

BATCH = ("train_batch_size=8", "train_micro_batch_size_per_gpu=2", 'gradient_accumulation_steps="auto"')
NO_DROPOUT = tuple(f"zero_tp.model.{name}_pdrop=0.0" for name in ("attn", "embd", "resid"))
"""It draws other numbers on other sizes."""
SETTINGS = (
    *BATCH,
    *NO_DROPOUT,
    "optimizer.params.lr=3e-4",
    "scheduler.params.total_num_steps=1000",
    "zero_tp.evaluation.interval=null",
)
WORDS = ["--deepspeed_config", "small.json", *(word for one in SETTINGS for word in ("--set", one))]
LIMITED = "zero_tp.training.timeout_minutes.heartbeat=0.5"
"""A machine may die while its part of a checkpoint is awaited: no connection tells of that."""
LONG = [*WORDS, "--set", "zero_tp.training.steps=1000", "--set", "zero_tp.checkpoint.interval=2", "--set", LIMITED]


def saved(launch: Launch, run: Path) -> int:
    """Wait for a checkpoint → its step."""
    trained(launch, run)
    wait_until(lambda: complete_steps(run), 60, launch.output, 0.1)
    return complete_steps(run)[-1]


def resumed(output: str) -> list[int]:
    """The steps that the launch has gone on from."""
    return [int(step) for step in re.findall(r"^resuming step (\d+)", output, re.MULTILINE)]


def goes_on(output: Callable[[], str], run: Path, sizes: str, times: int, seconds: float = 120) -> None:
    """Wait until ranks of these sizes have started so often and trained two steps."""
    started = f"{sizes}, SP, ZeRO-2, 8 × 64 tokens a step"
    wait_until(lambda: output().count(started) >= times, seconds, output, 0.2)
    before = steps(run)
    wait_until(lambda: steps(run) >= before + 2, 60, output, 0.1)


def the_same(slurm: Rack, workplace: Path, run: str) -> None:
    """Check that a run whose number of replicas changed has the losses of one machine.

    Sums over other micro-batches round otherwise, and training makes that larger.
    """
    last = steps(workplace / run)
    assert complete_steps(workplace / run)[-1] == last
    reference = alone(slurm, *WORDS, "--set", f"zero_tp.training.steps={last}", "--output-dir", f"{run}_alone").ended()
    assert reference.statuses == [0], reference.output
    found, expected = losses(workplace / run), losses(workplace / f"{run}_alone")
    assert [step for step, *_ in found] == list(range(1, last + 1))
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=1e-4)
    assert found[:2] == expected[:2], "the first two are of the same four ranks"


def test_torchrun_goes_on_without_a_machine_and_takes_it_back(slurm: Rack, workplace: Path) -> None:
    run, port = "runs/elastic", free_port()
    first, second = (agent(slurm, number, port, *LONG, "--output-dir", run) for number in range(2))
    step = saved(first, workplace / run)
    kill_all(slurm.nodes[1])
    goes_on(first.output, workplace / run, "TP 2 × DP 1", 1)
    assert resumed(first.output())[-1] >= step
    second = agent(slurm, 1, port, *LONG, "--output-dir", run)
    goes_on(first.output, workplace / run, "TP 2 × DP 2", 2)
    slurm.nodes[0].shell(f"kill -TERM $(cat {SHARED}/{run}/rank0.pid)")
    assert [*first.ended().statuses, *second.ended().statuses] == [0, 0], first.output() + second.output()
    the_same(slurm, workplace, run)


def test_slurm_goes_on_without_a_machine_and_takes_it_back(slurm: Rack, workplace: Path) -> None:
    """The machine's power goes: its connections stay open, and the other one's ranks give up before Slurm knows."""
    run, (first, second) = "runs/requeued", slurm.nodes
    words = [*LONG, "--output-dir", run, "--set", "zero_tp.training.timeout_minutes.step=0.2"]
    launch = sbatch(slurm, *words, options=["--nodes=1-2"])
    job = workplace / "job.out"
    step = saved(launch, workplace / run)
    slurm.shell("ip link set node2 down")
    try:
        kill_all(second, "slurmd", "slurmstepd")
        goes_on(job.read_text, workplace / run, "TP 2 × DP 1", 1, 180)
        assert resumed(job.read_text())[-1] >= step
        assert "ranks 0 and 1 wait for ranks 2 and 3" in job.read_text()
    finally:
        slurm.shell("ip link set node2 up")
        serve(second)
    # The controller sends again what it could not: the signal that ended the step, whose number the next one has too.
    log = "cat /run/slurm/slurmd.log"
    wait_until(lambda: "REQUEST_SIGNAL_TASKS" in second.shell(log), 120, lambda: second.shell(log), 0.5)
    number = first.run("squeue", "--noheader", "--format=%i", variables=VARIABLES).stdout.strip()
    told = first.run("scontrol", "requeue", number, variables=VARIABLES)
    assert told.returncode == 0, told.stdout
    goes_on(job.read_text, workplace / run, "TP 2 × DP 2", 2, 120)
    first.shell(f"kill -TERM $(cat {SHARED}/{run}/rank0.pid)")
    assert launch.ended().statuses == [0], launch.output()
    the_same(slurm, workplace, run)
