"""Signals to a run: save and go on, save and stop, whoever is told. Each case is a run of its own, of one process or a
launch of two ranks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.launched import ROOT, environment, launch, metrics_of, pretrain, said
from tests.support.pools import Pools
from tests.support.waits import patience, wait_until
from tests.tiers import THOROUGH
from zero_tp.checkpoint.directory import complete_steps, read_manifest, step_directory
from zero_tp.checkpoint.run_directory import PROCESS
from zero_tp.process.signals import Requests

HOST = socket.gethostname()
LIMIT = 90.0  # seconds of an idle machine


def wait_for(what: str, test: Callable[[], bool]) -> None:
    wait_until(test, LIMIT, f"waited in vain for {what}", 0.02)


class Running:
    """A run in `directory`/runs/NAME, long enough to be told something: launched, or without a launcher."""

    def __init__(self, workplace: Path, name: str, launcher: str | None):
        self.run = workplace / "runs" / name
        self.log = workplace / f"{name}.log"
        words = ["--deepspeed_config", "small.json", "--output-dir", str(self.run)]
        words += ["--set", "zero_tp.training.steps=100000", "--set", "zero_tp.checkpoint.interval=null"]
        words += ["--set", "scheduler.params.total_num_steps=1000", "--set", "zero_tp.evaluation.interval=null"]
        start = [sys.executable, str(ROOT / "launch/pretrain.py")] if launcher is None else launch(2, launcher)
        if launcher is None:
            words += ["--set", "zero_tp.parallel.tensor=1"]
        with self.log.open("w") as stream:
            self.launcher = subprocess.Popen(
                [*start, *words], cwd=workplace, env=environment(), stdout=stream, stderr=stream
            )

    def steps(self) -> int:
        try:
            return len([line for line in metrics_of(self.run) if "loss" in line])
        except (FileNotFoundError, ValueError):  # not there, or a line half written
            return 0

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        ranks = [process for process in self.processes() if process.environ().get("RANK") == str(number)]
        ranks = [process for process in ranks if "pretrain.py" in " ".join(process.cmdline())]
        return min(ranks, key=psutil.Process.create_time)  # not a process that it has forked

    def output(self) -> list[str]:
        return said(self.log.read_text())


@contextmanager
def running(workplace: Path, name: str, launcher: str | None = "deepspeed") -> Iterator[Running]:
    run, processes = Running(workplace, name, launcher), None
    try:
        wait_for("the first steps", lambda: run.steps() >= 2)
        processes = run.processes()
        yield run
        run.launcher.wait(patience(LIMIT))
        _, alive = psutil.wait_procs(processes, timeout=patience(10))
        assert not alive, f"left behind: {alive}"
    finally:
        for process in run.processes() if processes is None else processes:
            if process.is_running():
                process.kill()
        run.launcher.kill()
        run.launcher.wait()


def stopped_after(run: Running) -> int:
    """The step after which the run says that it stopped, and has saved."""
    line = next(line for line in run.output() if line.startswith("stopped after step "))
    step = int(line.split()[3].rstrip(","))
    assert complete_steps(run.run)[-1] == step
    read_manifest(step_directory(run.run, step))
    assert not (run.run / PROCESS).exists()
    return step


def told_ranks(late: bool) -> list[tuple[bool, bool]]:
    """What a rank acts on after each of six steps; another is asked to save in the second, and this in the fourth to
    stop."""
    requests, told = Requests(late=late), []
    requests.save = True  # of a run before, which nobody read
    with requests.accepting():
        requests.all_reduce(torch.device("cpu"))
    with requests.accepting():
        for step in range(1, 7):
            requests.save = step == 2 and dist.get_rank() == 1
            requests.stop = requests.stop or (step == 4 and dist.get_rank() == 0)
            told.append(requests.all_reduce(torch.device("cpu")))
    return told


def test_answers_that_are_read_late_come_one_step_later_on_all_ranks(ranks: Pools) -> None:
    nothing, save, stop = (False, False), (False, True), (True, False)
    for told in ranks(2).run(told_ranks, False):
        assert told == [nothing, save, nothing, stop, stop, stop]
    for told in ranks(2).run(told_ranks, True):
        assert told == [nothing, nothing, save, nothing, stop, stop]


@THOROUGH
@pytest.mark.parametrize("launcher", [None, "deepspeed"])
def test_one_rank_is_told_to_save_and_another_to_stop(workplace: Path, launcher: str | None) -> None:
    with running(workplace, f"told_{launcher}", launcher) as run:
        os.kill(int((run.run / PROCESS).read_text()), signal.SIGUSR1)
        wait_for("the checkpoint", lambda: len(complete_steps(run.run)) == 1)
        before = run.steps()
        wait_for("training to go on", lambda: run.steps() > before + 1)
        if launcher is None:
            run.launcher.terminate()
        else:
            run.rank(1).send_signal(signal.SIGTERM)
    assert run.launcher.returncode == 0, run.output()
    assert stopped_after(run) and len(complete_steps(run.run)) == 2


@THOROUGH
def test_a_run_that_was_told_to_stop_goes_on(workplace: Path) -> None:
    with running(workplace, "goes_on", "torchrun") as run:
        run.launcher.send_signal(signal.SIGTERM)  # torchrun tells all ranks
    step = stopped_after(run)
    assert step >= 2
    longer = ["--set", f"zero_tp.training.steps={step + 1}", "--set", "scheduler.params.total_num_steps=1000"]
    again = pretrain(2, workplace, "--deepspeed_config", "small.json", "--output-dir", str(run.run), *longer)
    assert again.returncode == 0, again.stderr
    assert f"resuming step {step}" in said(again.stdout)


@THOROUGH
def test_launch_py_tells_one_rank_after_another(workplace: Path) -> None:
    """DeepSpeed's launch.py tells its first rank, and the next when that one has gone; its own status is 1."""
    with running(workplace, "launch_py") as run:
        node = next(process for process in run.processes() if "deepspeed.launcher.launch" in process.cmdline())
        node.send_signal(signal.SIGTERM)
    assert stopped_after(run) >= 2


@THOROUGH
def test_a_second_sigterm_ends_a_rank_that_waits_for_a_stopped_peer(workplace: Path) -> None:
    with running(workplace, "twice") as run:
        run.rank(1).suspend()
        first = run.rank(0)
        first.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert first.is_running() and first.status() != psutil.STATUS_ZOMBIE, "the first one waits for a step boundary"
        first.send_signal(signal.SIGTERM)
        first.wait(patience(10))
        for process in run.processes():
            if process.status() == psutil.STATUS_STOPPED:
                process.kill()
    assert run.launcher.returncode != 0
    assert not complete_steps(run.run)


@THOROUGH
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.heavy)], ids=["SIGKILL", "SIGSEGV"]
)
def test_a_rank_that_dies_is_no_request(workplace: Path, number: signal.Signals) -> None:
    with running(workplace, f"killed_{number.name}") as run:
        started = time.monotonic()
        run.rank(1).send_signal(number)
        run.launcher.wait(patience(LIMIT))
        assert time.monotonic() - started < patience(25), "the survivors do not wait for a step boundary"
    assert run.launcher.returncode != 0
    assert any(f"rank 1 ({HOST}) was killed by {number.name}" in line for line in run.output()), run.output()
