"""Runs of tests/cuda: their device, and one launch for all of pytest's workers.

With ZERO_TP_TESTED_DEVICE=cpu the same runs compute on CPU, so that what launches them is tested
without a device.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

DEVICE = torch.device(os.environ.get("ZERO_TP_TESTED_DEVICE", "cuda"))
LIMIT_SECONDS = 1200


def require_device() -> None:
    assert DEVICE.type == "cpu" or torch.cuda.is_available()


def rank_variables() -> dict[str, str]:
    """Return the environment of a process on the tested device: in pytest's own DeepSpeed's
    accelerator is the CPU.
    """
    hidden = () if DEVICE.type == "cpu" else ("DS_ACCELERATOR",)
    return {name: value for name, value in os.environ.items() if name not in hidden}


def shared_directory(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a directory of this session that all of pytest's workers share."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name


def launch_once(directory: Path, launch: Callable[[Path], None]) -> Path:
    """Call `launch(directory)` in the first worker that asks; the others wait for its end.

    pytest-xdist's documentation does so for fixtures of a session.

    Raises:
        AssertionError: in every other worker, if the first one's call failed.
    """
    directory.mkdir(exist_ok=True)
    ended, failed = directory / "ended", directory / "failed"
    with FileLock(f"{directory}.lock"):
        if not ended.exists():
            try:
                launch(directory)
            except BaseException:
                failed.write_text(traceback.format_exc())
                raise
            finally:
                ended.touch()
    assert not failed.exists(), failed.read_text()
    return directory


def write_run(directory: Path, name: str, config: Mapping[str, Any]) -> None:
    place = directory / name
    place.mkdir()
    (place / "run.json").write_text(json.dumps(config))


def train_runs(directory: Path) -> None:
    """Train DIRECTORY/NAME/run.json, in as many processes as pytest has workers."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    # The processes share the cores.
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    words = ["-m", "tests.cuda.training_rank", str(directory)]
    run_processes([[*words, str(part), str(count)] for part in range(count)], variables)


def train_on_one_device(directory: Path, ranks: int) -> None:
    """Train DIRECTORY/NAME/run.json on several ranks that share a device, over gloo."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    run_processes([[*launcher, "-m", "tests.cuda.training_rank", str(directory), "0", "1"]], {})


def run_processes(commands: Sequence[list[str]], variables: Mapping[str, str]) -> None:
    """Run Python with each command at once, on the tested device.

    Raises:
        AssertionError: one failed or took longer than LIMIT_SECONDS; the others are killed.
    """
    environment = rank_variables() | dict(variables)
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
            for command in commands
        ]
        for process in processes:
            stack.callback(process.kill)
        for process in processes:
            output, _ = process.communicate(timeout=LIMIT_SECONDS)
            assert process.returncode == 0, output[-5000:]


def trace_of(directory: Path, name: str, rank: int = 0) -> dict[str, Any]:
    """Return the values of a rank's trace; an AssertionError has the run's own error."""
    error = directory / name / "error"
    assert not error.exists(), error.read_text()
    values: dict[str, Any] = torch.load(directory / name / f"trace{rank}.pt")
    return values
