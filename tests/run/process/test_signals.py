"""Signals to a run's ranks: SIGUSR1 saves, SIGTERM saves and stops, and all ranks act at the
same step.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.run.process.runs import LIMIT, Run, running
from tests.support.launched import pretrain, said
from tests.support.pools import Pools
from tests.support.waits import wait_until
from tests.tiers import THOROUGH
from zero_tp.run.checkpoint.directory import complete_steps, read_manifest, step_directory
from zero_tp.run.checkpoint.run_directory import PROCESS
from zero_tp.run.process import signals
from zero_tp.run.process.signals import Requests


def requests_seen(late: bool) -> list[tuple[bool, bool]]:
    """Return what a rank acts on after each of six steps.

    Rank 1 gets a request to save in the second step, and rank 0 one to stop in the fourth.
    """
    requests, seen = Requests(late=late), []
    requests.save = True  # of a run before, which nobody read
    with requests.accepting():
        requests.all_reduce(torch.device("cpu"))
    with requests.accepting():
        for step in range(1, 7):
            requests.save = step == 2 and dist.get_rank() == 1
            requests.stop = requests.stop or (step == 4 and dist.get_rank() == 0)
            seen.append(requests.all_reduce(torch.device("cpu")))
    return seen


def test_requests_reach_all_ranks_in_one_step_and_late_ones_a_step_later(ranks: Pools) -> None:
    nothing, save, stop = (False, False), (False, True), (True, False)
    for seen in ranks(2).run(requests_seen, False):
        assert seen == [nothing, save, nothing, stop, stop, stop]
    for seen in ranks(2).run(requests_seen, True):
        assert seen == [nothing, nothing, save, nothing, stop, stop]


def test_a_request_that_comes_while_flags_are_reduced_is_answered_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slowest rank may keep the others waiting there for seconds."""
    requests, arriving = Requests(), [True, False, False]

    def reduce(flags: list[bool], device: torch.device) -> SimpleNamespace:
        requests.save = requests.save or arriving.pop(0)
        return SimpleNamespace(read=lambda: flags)

    monkeypatch.setattr(signals, "_all_reduce_flags", reduce)
    answers = [requests.all_reduce(torch.device("cpu")) for _ in range(3)]
    assert answers == [(False, False), (False, True), (False, False)]


def saved_stop(run: Run) -> int:
    """Return the step after which the run has stopped, and check that it has saved it."""
    line = next(line for line in run.output() if line.startswith("stopped after step "))
    step = int(line.split()[3].rstrip(","))
    assert complete_steps(run.directory)[-1] == step >= 2
    read_manifest(step_directory(run.directory, step))
    assert not (run.directory / PROCESS).exists()
    return step


@THOROUGH
@pytest.mark.parametrize("launcher", [None, "deepspeed", "torchrun"])
def test_sigusr1_saves_and_a_sigterm_to_the_launcher_saves_and_stops(
    workplace: Path, launcher: str | None
) -> None:
    """torchrun signals all ranks; DeepSpeed's launch.py one after another, each when the one
    before has ended.
    """
    with running(workplace, f"told_{launcher}", launcher) as run:
        os.kill(int((run.directory / PROCESS).read_text()), signal.SIGUSR1)
        wait_until(lambda: len(complete_steps(run.directory)) == 1, LIMIT, "no checkpoint", 0.02)
        before = run.steps()
        wait_until(lambda: run.steps() > before + 1, LIMIT, "training has stopped", 0.02)
        pid = run.launcher.pid
        if launcher == "deepspeed":
            pid = next(
                each.pid
                for each in run.processes()
                if "deepspeed.launcher.launch" in each.cmdline()
            )
        os.kill(pid, signal.SIGTERM)
    step = saved_stop(run)
    assert len(complete_steps(run.directory)) == 2
    if launcher == "torchrun":
        longer = [
            "--set",
            f"zero_tp.training.steps={step + 1}",
            "--set",
            "scheduler.params.total_num_steps=1000",
        ]
        again = pretrain(
            2,
            workplace,
            "--deepspeed_config",
            "small.json",
            "--output-dir",
            str(run.directory),
            *longer,
        )
        assert again.returncode == 0, again.stderr
        assert f"resuming step {step}" in said(again.stdout)
