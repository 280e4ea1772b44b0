"""A run that loses a machine ends in a bounded time, or resumes on the machines that are left
and takes it back.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.nodes import SHARED, Rack
from tests.cluster.runs import LONG, check_printed_once, kill_all, losses, steps, trained
from tests.cluster.slurm import VARIABLES, serve
from tests.cluster.starts import Ended, Launch, agent, alone, sbatch, torchrun
from tests.support.launched import free_port
from tests.support.waits import patience, wait_until
from zero_tp.run.checkpoint.directory import complete_steps

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# ---- the run ends --------------------------------------------------------------------------------

LIMIT = 15
FOUND = LIMIT + 35
"""Seconds of an idle machine from a fault to the end of all ranks: the limit, the store's
answers, and the exit.
"""


def limited(slurm: Rack, workplace: Path, run: str) -> Launch:
    limit = f'zero_tp.training.timeout_minutes={{"step": {LIMIT / 60}}}'
    return trained(torchrun(slurm, *LONG, "--set", limit, "--output-dir", run), workplace / run)


def test_a_link_that_is_down_is_found(slurm: Rack, workplace: Path) -> None:
    launch = limited(slurm, workplace, "runs/unplugged")
    begun = time.monotonic()
    slurm.shell("ip link set node2 down")
    try:
        status = launch.processes[0].wait(patience(180))
        seconds = time.monotonic() - begun
    finally:
        slurm.shell("ip link set node2 up")
    launch.ended()
    first = Ended([status], launch.output(0))
    assert status != 0 and seconds < patience(FOUND)
    check_printed_once(first, "error: no progress in step")
    check_printed_once(
        first, "zero_tp.training.timeout_minutes): ranks 0 and 1 wait for ranks 2 and 3"
    )
    # The second machine can't read that line. Its ranks print their own, or its agent misses the
    # first one's sooner.
    assert re.search("error: no progress in step|RendezvousConnectionError", launch.output(1)), (
        launch.output(1)
    )


def test_the_end_of_the_first_machine_ends_the_others(slurm: Rack, workplace: Path) -> None:
    launch = limited(slurm, workplace, "runs/headless")
    begun = time.monotonic()
    kill_all(slurm.nodes[0])
    assert 0 not in launch.ended().statuses
    assert time.monotonic() - begun < patience(FOUND)


# ---- the run resumes -----------------------------------------------------------------------------

BATCH = (
    "train_batch_size=8",
    "train_micro_batch_size_per_gpu=2",
    'gradient_accumulation_steps="auto"',
)
NO_DROPOUT = tuple(f"zero_tp.model.{name}_pdrop=0.0" for name in ("attn", "embd", "resid"))
"""Dropout draws other numbers on other sizes."""
SETTINGS = (
    *BATCH,
    *NO_DROPOUT,
    "optimizer.params.lr=3e-4",
    "scheduler.params.total_num_steps=1000",
    "zero_tp.evaluation.interval=null",
)
WORDS = ["--deepspeed_config", "small.json", *(word for one in SETTINGS for word in ("--set", one))]
# If a machine dies while the others wait for its checkpoint, no connection breaks. Then the
# heartbeat ends the run.
RESUMED = ("training.steps=1000", "checkpoint.interval=2", "training.timeout_minutes.heartbeat=0.5")
SAVING = [*WORDS, *(word for one in RESUMED for word in ("--set", f"zero_tp.{one}"))]


def saved(launch: Launch, run: Path) -> int:
    """Wait for a checkpoint → its step."""
    trained(launch, run)
    wait_until(lambda: complete_steps(run), 60, launch.output, 0.1)
    return complete_steps(run)[-1]


def resumed(output: str) -> list[int]:
    """Return the steps that the launch has resumed."""
    return [int(step) for step in re.findall(r"^resuming step (\d+)", output, re.MULTILINE)]


def wait_for_restart(
    output: Callable[[], str], run: Path, sizes: str, times: int, seconds: float = 120
) -> None:
    """Wait until ranks of these sizes have started so often and trained two steps."""
    started = f"{sizes}, SP, ZeRO-2, 8 × 64 tokens a step"
    wait_until(lambda: output().count(started) >= times, seconds, output, 0.2)
    before = steps(run)
    wait_until(lambda: steps(run) >= before + 2, 60, output, 0.1)


def check_losses(slurm: Rack, workplace: Path, run: str) -> None:
    """Check that a run whose number of replicas changed has the losses of one machine.

    Other micro-batches change the rounding of sums, and training amplifies that.
    """
    last = steps(workplace / run)
    assert complete_steps(workplace / run)[-1] == last
    reference = alone(
        slurm, *WORDS, "--set", f"zero_tp.training.steps={last}", "--output-dir", f"{run}_alone"
    ).ended()
    assert reference.statuses == [0], reference.output
    ours, expected = losses(workplace / run), losses(workplace / f"{run}_alone")
    assert [step for step, *_ in ours] == list(range(1, last + 1))
    assert [loss for _, loss, _ in ours] == pytest.approx(
        [loss for _, loss, _ in expected], rel=1e-4
    )
    assert ours[:2] == expected[:2], "the first two are of the same four ranks"


def test_torchrun_resumes_without_a_machine_and_takes_it_back(slurm: Rack, workplace: Path) -> None:
    run, port = "runs/elastic", free_port()
    first, second = (
        agent(slurm, number, port, *SAVING, "--output-dir", run) for number in range(2)
    )
    step = saved(first, workplace / run)
    kill_all(slurm.nodes[1])
    wait_for_restart(first.output, workplace / run, "TP 2 × DP 1", 1)
    assert resumed(first.output())[-1] >= step
    second = agent(slurm, 1, port, *SAVING, "--output-dir", run)
    wait_for_restart(first.output, workplace / run, "TP 2 × DP 2", 2)
    slurm.nodes[0].shell(f"kill -TERM $(cat {SHARED}/{run}/rank0.pid)")
    assert [*first.ended().statuses, *second.ended().statuses] == [0, 0], (
        first.output() + second.output()
    )
    check_losses(slurm, workplace, run)


def test_slurm_resumes_without_a_machine_and_takes_it_back(slurm: Rack, workplace: Path) -> None:
    """A power failure leaves connections open, and the other machine's ranks end before Slurm
    notices it.
    """
    run, (first, second) = "runs/requeued", slurm.nodes
    words = [*SAVING, "--output-dir", run, "--set", "zero_tp.training.timeout_minutes.step=0.2"]
    launch = sbatch(slurm, *words, options=["--nodes=1-2"])
    job = workplace / "job.out"
    step = saved(launch, workplace / run)
    slurm.shell("ip link set node2 down")
    try:
        kill_all(second, "slurmd", "slurmstepd")
        wait_for_restart(job.read_text, workplace / run, "TP 2 × DP 1", 1, 180)
        assert resumed(job.read_text())[-1] >= step
        assert "ranks 0 and 1 wait for ranks 2 and 3" in job.read_text()
    finally:
        slurm.shell("ip link set node2 up")
        serve(second)
    # The controller resends the signal that ended the step. The next step has the same number, so
    # wait for the signal.
    log = "cat /run/slurm/slurmd.log"
    wait_until(
        lambda: "REQUEST_SIGNAL_TASKS" in second.shell(log), 120, lambda: second.shell(log), 0.5
    )
    number = first.run("squeue", "--noheader", "--format=%i", variables=VARIABLES).stdout.strip()
    requeued = first.run("scontrol", "requeue", number, variables=VARIABLES)
    assert requeued.returncode == 0, requeued.stdout
    wait_for_restart(job.read_text, workplace / run, "TP 2 × DP 2", 2, 120)
    first.shell(f"kill -TERM $(cat {SHARED}/{run}/rank0.pid)")
    assert launch.ended().statuses == [0], launch.output()
    check_losses(slurm, workplace, run)
