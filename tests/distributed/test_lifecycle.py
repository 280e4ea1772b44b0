"""How a launched job ends: the last word, the exit status, the time it takes, and that no process is left.

Every case is a real launch of three CPU ranks (gloo), about six seconds each.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.launched import default_interrupts, free_port
from tests.tiers import THOROUGH
from tests.waits import patience

SCRIPT = Path(__file__).with_name("_lifecycle_rank.py")
ROOT = SCRIPT.parents[2]
LAUNCHER_LINE = re.compile(r"^\[\d{4}-\d\d-\d\d [\d:,]+\] \[[A-Z]+\] \[(launch|runner)\.py:")
LIMIT_SECONDS = 120.0  # of an idle machine
LAUNCHER_SECONDS = 30.0  # then a launcher kills the ranks that it has told to end
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_accelerators", "3")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "3")


class Launch:
    """One launched job; its processes are known by a word in their command lines."""

    def __init__(self, directory: Path, case: str, launcher: tuple[str, ...]) -> None:
        self.marker = uuid.uuid4().hex
        self.log = directory / "output.txt"
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["TMPDIR"] = str(directory)
        with self.log.open("w") as stream:
            self.runner = subprocess.Popen(
                [
                    sys.executable,
                    *launcher,
                    "--master_port",
                    str(free_port()),
                    str(SCRIPT),
                    "--case",
                    case,
                    "--marker",
                    self.marker,
                ],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                start_new_session=True,
                preexec_fn=default_interrupts,
            )

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            if self.marker in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        ranks = [process for process in self.processes() if process.environ().get("RANK") == str(number)]
        return min(ranks, key=psutil.Process.create_time)  # not a process that it has forked

    def launch_py(self) -> psutil.Process:
        parent = self.rank(0).parent()
        assert parent is not None
        return parent

    def wait_for(self, text: str) -> None:
        """Imports alone take most of a minute on a busy machine: no time is measured before `text` is there."""
        start = time.monotonic()
        ended = False
        while text not in self.log.read_text():
            assert not ended and time.monotonic() - start < patience(LIMIT_SECONDS), self.log.read_text()
            ended = self.runner.poll() is not None  # then one more look
            time.sleep(0.05)

    def end(self) -> tuple[int, str, float]:
        """Wait until every process has gone → the launcher's status, what was printed, the seconds it took."""
        start = time.monotonic()
        while self.processes():
            assert time.monotonic() - start < patience(LIMIT_SECONDS), (self.processes(), self.log.read_text())
            time.sleep(0.1)
        status = self.runner.wait(timeout=patience(5))
        return status, self.log.read_text(), time.monotonic() - start


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(case: str, launcher: tuple[str, ...] = DEEPSPEED) -> Launch:
        launches.append(Launch(tmp_path, case, launcher))
        return launches[-1]

    yield start
    for each in launches:
        for process in each.processes():
            process.kill()
        each.runner.wait()


def own_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.strip() and not LAUNCHER_LINE.match(line)]


@THOROUGH
def test_wrong_input_is_said_once_and_ends_with_status_2(launch: Callable[..., Launch]) -> None:
    job = launch("user-error")
    job.wait_for("error: ")
    status, output, _ = job.end()
    assert status == 2
    assert own_lines(output) == ["error: zero_tp.training.steps is -1: it must be at least 1"]


@THOROUGH
def test_success_ends_with_status_0_and_says_nothing(launch: Callable[..., Launch]) -> None:
    job = launch("success")
    job.wait_for("looping")
    status, output, _ = job.end()
    assert status == 0
    assert own_lines(output) == ["looping"]


@THOROUGH
def test_a_failing_rank_has_the_last_word(launch: Callable[..., Launch]) -> None:
    job = launch("exception")
    job.wait_for("rank 1 failed")
    status, output, _ = job.end()
    lines = own_lines(output)
    assert status == 1
    assert lines[-1] == "rank 1 failed: ArithmeticError: the loss is not finite at step 10"
    assert output.count("Traceback") == 1
    assert all(line.startswith("rank 1") for line in lines[1:])


@THOROUGH
def test_a_failing_rank_has_the_last_word_before_torchruns(launch: Callable[..., Launch]) -> None:
    job = launch("exception", TORCHRUN)
    job.wait_for("rank 1 failed")
    status, output, _ = job.end()
    lines = [line for line in own_lines(output) if line.startswith("rank ")]
    assert status == 1
    assert lines[-1] == "rank 1 failed: ArithmeticError: the loss is not finite at step 10"
    assert all(line.startswith("rank 1") for line in lines)


@THOROUGH
def test_a_killed_rank_is_named_by_one_survivor(launch: Callable[..., Launch]) -> None:
    job = launch("loop")
    job.wait_for("looping")
    job.rank(1).kill()
    status, output, _ = job.end()
    assert status not in (0, None)
    lines = own_lines(output)
    assert len(lines) == 2
    assert lines[1].startswith("error: rank 1 ended without a word (killed")


@THOROUGH
def test_sigterm_to_one_rank_while_it_waits_in_a_collective(launch: Callable[..., Launch]) -> None:
    job = launch("stuck")
    job.wait_for("looping")
    time.sleep(0.5)  # ranks 0 and 2 wait inside the collective now
    job.rank(2).send_signal(signal.SIGTERM)
    status, output, _ = job.end()
    assert status not in (0, None)
    assert own_lines(output)[1:] == ["rank 2: ended by SIGTERM"]


@THOROUGH
def test_interrupt_is_said_once_and_leaves_no_process(launch: Callable[..., Launch]) -> None:
    job = launch("loop")
    job.wait_for("looping")
    os.killpg(job.runner.pid, signal.SIGINT)
    status, output, seconds = job.end()
    assert status != 0 and seconds < patience(LAUNCHER_SECONDS)
    assert output.count("interrupted") == 1
    assert not re.search(r"^(error|rank \d)", output, re.MULTILINE)


@THOROUGH
@pytest.mark.parametrize(
    ("victim", "number", "name"),
    [
        pytest.param("runner", signal.SIGTERM, "deepspeed", marks=pytest.mark.heavy),
        ("launch.py", signal.SIGKILL, "deepspeed's launch.py"),
    ],
)
def test_ranks_end_when_a_launcher_above_them_is_gone(
    launch: Callable[..., Launch], victim: str, number: signal.Signals, name: str
) -> None:
    job = launch("stuck")
    job.wait_for("looping")
    time.sleep(0.5)
    pid = job.runner.pid if victim == "runner" else job.launch_py().pid
    os.kill(pid, number)
    _, output, seconds = job.end()
    assert seconds < patience(LAUNCHER_SECONDS)
    lines = own_lines(output)[1:]
    assert len(lines) == 1
    assert re.fullmatch(rf"error: the launcher above rank \d \({name}, process {pid}\) is gone", lines[0])
