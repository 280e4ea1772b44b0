"""Runs on the nodes of a rack: their steps, their processes and their output."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.cluster.nodes import Node
from tests.cluster.starts import Ended, Launch
from tests.support.launched import metrics_of
from tests.support.waits import wait_until

LONG = ["--deepspeed_config", "small.json", "--set", "zero_tp.training.steps=100000"]
LONG += ["--set", "zero_tp.checkpoint.interval=null", "--set", "zero_tp.evaluation.interval=null"]


def losses(run: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, norm of the gradients) of each logged step."""
    return [
        (line["step"], line["loss"], line["grad_norm"])
        for line in metrics_of(run)
        if "loss" in line
    ]


def steps(run: Path) -> int:
    try:
        return len(losses(run))
    except (FileNotFoundError, ValueError):  # not there, or a line half written
        return 0


def trained(launch: Launch, run: Path) -> Launch:
    """Wait for two steps."""
    wait_until(
        lambda: steps(run) >= 2 or launch.processes[0].poll() is not None,
        120,
        "it did not train",
        0.1,
    )
    assert launch.processes[0].poll() is None, launch.output()
    return launch


def process_of(rank: int, node: Node) -> psutil.Process:
    """Return the process of a rank: its first words are Python's and the script's, and it was
    not forked by a rank.
    """
    processes = []
    for process in node.processes():
        with contextlib.suppress(psutil.Error):  # it has ended
            if any(word.endswith("launch/pretrain.py") for word in process.cmdline()[:3]):
                names = process.environ()
                if names.get("RANK", names.get("SLURM_PROCID")) == str(rank):
                    processes.append(process)
    return min(processes, key=psutil.Process.create_time)


def kill_all(node: Node, *more: str) -> None:
    """Kill a node's launcher and ranks, and the processes called `more`; the kernel closes their
    connections.
    """
    killed = True
    while killed:  # a launcher may have started one meanwhile
        killed = False
        for process in node.processes():
            with contextlib.suppress(psutil.Error):  # it has ended
                if (
                    any(word.endswith("launch/pretrain.py") for word in process.cmdline())
                    or process.name() in more
                ):
                    process.kill()
                    killed = True


def check_printed_once(ended: Ended, text: str) -> None:
    """Check that one rank has printed the text. srun prints the statuses of each machine by
    errors of its own.
    """
    lines = [
        line
        for line in ended.output.splitlines()
        if text in line and not line.startswith("srun: error: node")
    ]
    assert len(lines) == 1, ended.output
    assert "Traceback (most recent call last)" not in lines[0]
