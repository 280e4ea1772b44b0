#!/usr/bin/env python3
"""Time from the command to the first step of the quickstart's pretraining (4 CPU ranks), part by
part.

The ranks run launch/pretrain.py with clocks around its parts. Several starts; prints the median of
each part on rank 0, wall time and rank 0's own CPU time, which other work on the machine changes
less. --output writes a dated result.

    python benchmarks/start.py --rounds 5 --output benchmarks/results/     # after bash
    launch/quickstart.sh
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dated import ROOT, write_result  # type: ignore[import-not-found]  # beside this script

RANKS = 4
MARKS = "ZERO_TP_START_MARKS"  # the file that rank 0 writes its marks to
LAUNCHERS = {
    "deepspeed": ["-m", "deepspeed.launcher.runner", "-q", "--num_accelerators", str(RANKS)],
    "torchrun": ["-m", "torch.distributed.run", "--nproc_per_node", str(RANKS)],
}
SETTINGS = {
    "zero_tp.training.steps": 1,
    "zero_tp.evaluation.batches": 1,
    "scheduler.params.warmup_num_steps": 1,
}
IMPORTS = {
    "torch": ["torch.distributed"],
    "transformers": ["transformers.models.auto.configuration_auto"],
    "DeepSpeed": ["deepspeed"],
    "zero_tp": ["zero_tp.run.loop", "zero_tp.run.run_inputs", "zero_tp.run.start"],
}


class Clock:
    """Record the time at which each part ends."""

    def __init__(self) -> None:
        self.marks: list[tuple[str, float, float]] = []

    def ended(self, part: str) -> None:
        self.marks.append((part, time.time(), time.process_time()))

    def around(self, owner: Any, name: str, before: str, part: str) -> None:
        """Record the start of each call of `owner.name` as the end of `before`, and its end as
        that of `part`.
        """
        called: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self.ended(before)
            result = called(*arguments, **options)
            self.ended(part)
            return result

        setattr(owner, name, timed)


def rank() -> None:
    """Run launch/pretrain.py with clocks, until its first step has ended."""
    clock = Clock()
    file = os.environ.pop(MARKS)
    clock.ended("Python")
    for part, modules in IMPORTS.items():
        for module in modules:
            importlib.import_module(module)
        clock.ended(f"import {part}")
    from zero_tp.engine.engine import TrainingEngine
    from zero_tp.engine.zero.zero_engine import ZeroEngine
    from zero_tp.run import start as starting

    clock.around(starting, "connect_deepspeed", "config and data", "connect")
    clock.around(ZeroEngine, "initialize", "model", "deepspeed.initialize")
    step = TrainingEngine.run_step

    def first_step(*arguments: Any, **options: Any) -> Any:
        clock.ended("forecast, peak FLOP/s")
        result = step(*arguments, **options)
        clock.ended("first step")
        if os.environ["RANK"] == "0":
            Path(file).write_text(json.dumps(clock.marks))
        return result

    TrainingEngine.run_step = first_step  # type: ignore[method-assign]
    sys.argv[0] = str(ROOT / "launch" / "pretrain.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


def start(launcher: str, config: Path) -> dict[str, tuple[float, float]]:
    """Start the run once; return rank 0's (seconds, CPU seconds) by part."""
    with tempfile.TemporaryDirectory() as directory:
        marks = Path(directory) / "marks.json"
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        environment[MARKS] = str(marks)
        words = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
        run = ["--deepspeed_config", str(config), "--output-dir", f"{directory}/run", *words]
        start_time = time.time()
        with socket.create_server(
            ("127.0.0.1", 0)
        ) as free:  # the launchers' own is always the same
            port = ["--master_port", str(free.getsockname()[1])]
        command = [sys.executable, *LAUNCHERS[launcher], *port, str(Path(__file__).resolve()), *run]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        reached = {}
        wall = start_time
        cpu = 0.0
        for part, ended, used in json.loads(marks.read_text()):
            reached[part] = (ended - wall, used - cpu)
            wall = ended
            cpu = used
        return {"launcher, Python": reached.pop("Python"), **reached}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "ds_configs" / "quickstart.json")
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed")
    parser.add_argument(
        "--rounds", type=int, default=5, help="starts (default: 5), after one that is not counted"
    )
    parser.add_argument("--output", type=Path, help="directory for the dated result")
    options = parser.parse_args()
    start(options.launcher, options.config.resolve())  # reads the libraries' files into memory
    rounds = [start(options.launcher, options.config.resolve()) for _ in range(options.rounds)]
    rounds = [
        {**each, "all": (sum(w for w, _ in each.values()), sum(c for _, c in each.values()))}
        for each in rounds
    ]
    print(f"{'part':24} {'seconds':>8} {'from':>6} {'to':>6} {'CPU s':>6}")
    for part in rounds[0]:
        wall, cpu = zip(*(each[part] for each in rounds), strict=True)
        figures = (
            f"{statistics.median(wall):8.2f} {min(wall):6.2f} {max(wall):6.2f} "
            f"{statistics.median(cpu):6.2f}"
        )
        print(f"{part:24} {figures}")
    if options.output:
        result = {
            "config": f"{options.config.name}, {RANKS} CPU ranks, started by {options.launcher}",
            "load_average": os.getloadavg(),
            "seconds": {part: [each[part][0] for each in rounds] for part in rounds[0]},
            "rank_0_cpu_seconds": {part: [each[part][1] for each in rounds] for part in rounds[0]},
        }
        write_result(options.output, "start", result)


if __name__ == "__main__":
    rank() if MARKS in os.environ and "RANK" in os.environ else main()
