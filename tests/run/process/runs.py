"""Long runs of launch/pretrain.py, for tests that send signals to their processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.launched import ROOT, environment, launch, metrics_of, said
from tests.support.waits import patience, wait_until

LIMIT = 90.0  # seconds of an idle machine


class Run:
    """A run without end in `workplace`/runs/NAME, with a launcher and two ranks or without one."""

    def __init__(self, workplace: Path, name: str, launcher: str | None, *settings: str) -> None:
        self.directory, self.log = workplace / "runs" / name, workplace / f"{name}.log"
        settings += ("zero_tp.training.steps=100000", "zero_tp.checkpoint.interval=null")
        settings += ("scheduler.params.total_num_steps=1000", "zero_tp.evaluation.interval=null")
        command = (
            [sys.executable, str(ROOT / "launch/pretrain.py")]
            if launcher is None
            else launch(2, launcher)
        )
        settings += ("zero_tp.parallel.tensor=1",) if launcher is None else ()
        command += ["--deepspeed_config", "small.json", "--output-dir", str(self.directory)]
        command += [word for setting in settings for word in ("--set", setting)]
        with self.log.open("w") as stream:
            self.launcher = subprocess.Popen(
                command, cwd=workplace, env=environment(), stdout=stream, stderr=stream
            )

    def steps(self) -> int:
        try:
            return len([line for line in metrics_of(self.directory) if "loss" in line])
        except (FileNotFoundError, ValueError):  # not there, or a line half written
            return 0

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        ranks = [
            process for process in self.processes() if process.environ().get("RANK") == str(number)
        ]
        ranks = [process for process in ranks if "pretrain.py" in " ".join(process.cmdline())]
        return min(ranks, key=psutil.Process.create_time)  # not a process that it has forked

    def output(self) -> list[str]:
        return said(self.log.read_text())


@contextmanager
def running(
    workplace: Path, name: str, launcher: str | None = "deepspeed", *settings: str
) -> Iterator[Run]:
    """Start a run, and wait for its first steps; after the block wait until all its processes
    have ended.
    """
    run, processes = Run(workplace, name, launcher, *settings), None
    try:
        wait_until(lambda: run.steps() >= 2, LIMIT, lambda: run.log.read_text(), 0.02)
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
