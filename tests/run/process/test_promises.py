"""The promises of a run under `deepspeed` and `torchrun`: each section below tests the promise of
its number.

The first tier has each promise under one launcher, the second tier under the others. Every case
launches two CPU ranks of tests/support/promise_rank.py. Tests without a launcher:
test_lifecycle.py, test_watchdog.py, and test_hang_report.py for NCCL's flight recorder.
tests/run/test_pretrain.py has a resumed run's samples.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launched import default_interrupts, environment, launch, said
from tests.support.waits import patience, wait_until
from tests.tiers import THOROUGH, in_tiers
from zero_tp.run.checkpoint.run_directory import OwnerChanged, RunOwner, run_directory
from zero_tp.run.process.environment import is_alive

SCRIPT = "tests/support/promise_rank.py"
LAUNCHERS = ["launch.py", "torchrun"]
"""DeepSpeed's and torch's launchers of one machine's ranks."""
HOST = socket.gethostname()
LIMIT_SECONDS = 120.0  # of an idle machine
LAUNCHER_SECONDS = 20.0  # from a launcher's end to that of its ranks


class Job:
    """One launched job; its processes are known by a word in their command lines."""

    def __init__(self, directory: Path, case: str, launcher: str, *options: str) -> None:
        self.marker, self.log = uuid.uuid4().hex, directory / "output.txt"
        *start, script = launch(2, launcher, SCRIPT)
        restarts = (
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if "--max-restarts" in options else {}
        )
        with self.log.open("w") as stream:
            self.launcher = subprocess.Popen(
                [*start, *options, script, "--case", case, "--marker", self.marker],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment() | restarts,
                cwd=directory,
                start_new_session=True,
                preexec_fn=default_interrupts,
            )

    def processes(self) -> list[psutil.Process]:
        found = psutil.process_iter(["cmdline"])
        return [
            process
            for process in found
            if self.marker in (process.info["cmdline"] or []) and is_alive(process)
        ]

    def rank(self, number: int) -> psutil.Process:
        return next(
            process for process in self.processes() if process.environ().get("RANK") == str(number)
        )

    def wait_for(self, text: str) -> None:
        def is_there() -> bool:
            ended = self.launcher.poll() is not None  # then one more look
            there = text in self.log.read_text()
            assert there or not ended, self.log.read_text()
            return there

        wait_until(
            is_there, LIMIT_SECONDS, lambda: f"no {text!r} in:\n{self.log.read_text()}", 0.05
        )

    def end(self, seconds: float = LIMIT_SECONDS) -> tuple[int, list[str]]:
        """Wait until every process has gone → the launcher's status, and the ranks' lines
        without torchrun's own.
        """
        wait_until(
            lambda: not self.processes(),
            seconds,
            lambda: f"{self.processes()}:\n{self.log.read_text()}",
            0.1,
        )
        status = self.launcher.wait(patience(10))
        begins = ("rank ", "error: ", "five steps", "saved", "stopped", "interrupted")
        return status, [line for line in said(self.log.read_text()) if line.startswith(begins)]


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    jobs: list[Job] = []

    def start_job(case: str, launcher: str, *options: str) -> Job:
        jobs.append(Job(tmp_path, case, launcher, *options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        for process in job.processes():
            process.kill()
        job.launcher.wait()


# --- 1. wrong input -------------------------------------------------------------------------------


WRONG_INPUT = {
    "wrong input": "zero_tp.training.steps is -1: it must be at least 1",
    # it ends all ranks before they connect
    "wrong input on one rank": "local rank 1 has no device",
}
WRONG_INPUT_CASES = [
    (case, launcher) for case in WRONG_INPUT for launcher in ("deepspeed", *LAUNCHERS)
]
WRONG_INPUT_FIRST = [("wrong input on one rank", "launch.py")]


@THOROUGH
@pytest.mark.parametrize(("case", "launcher"), in_tiers(WRONG_INPUT_CASES, WRONG_INPUT_FIRST))
def test_wrong_input_is_one_line_and_status_2(case: str, launcher: str, start: Start) -> None:
    job = start(case, launcher)
    status, lines = job.end()
    assert status == (1 if launcher == "torchrun" else 2), "torchrun's own status is 1"
    assert lines == [f"error: {WRONG_INPUT[case]}"]
    if launcher == "torchrun":
        assert "exitcode  : 2" in job.log.read_text() and "error_file: <N/A>" in job.log.read_text()


# --- 2. a rank that fails -------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["torchrun"]))
def test_a_failing_rank_prints_its_traceback_and_ends_the_others_at_once(
    launcher: str, start: Start, tmp_path: Path
) -> None:
    """The launcher's SIGTERM finds rank 0 in a step of minutes, at whose end a request would be
    handled.
    """
    options = ["--log-dir", "logs"] if launcher == "torchrun" else []
    job = start("exception during a long step", launcher, *options)
    status, (first, *lines, last) = job.end(LAUNCHER_SECONDS)
    assert status == 1
    assert first == "five steps" and "rank 1: Traceback (most recent call last):" in lines
    assert all(line.startswith("rank 1: ") for line in lines)
    assert last == f"rank 1 ({HOST}): ArithmeticError: the loss is not finite at step 10"
    if launcher == "torchrun":
        files = list((tmp_path / "logs").rglob("error.json"))
        [message] = [json.loads(file.read_text())["message"]["message"] for file in files]
        assert message.startswith("ArithmeticError: the loss is not finite")


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["launch.py"]))
@pytest.mark.parametrize("number", in_tiers([signal.SIGKILL, signal.SIGSEGV], [signal.SIGKILL]))
def test_a_killed_rank_is_named_by_a_survivor(
    number: signal.Signals, launcher: str, start: Start
) -> None:
    job = start("loop", launcher)
    job.wait_for("five steps")
    job.rank(1).send_signal(number)
    status, (first, line) = job.end()
    assert status != 0
    assert (
        first == "five steps" and line.startswith(f"error: rank 1 ({HOST}) ") and "killed" in line
    )


@THOROUGH
def test_a_rank_killed_in_an_exchange_with_experts_is_named(start: Start) -> None:
    status, (first, line) = start("killed in an exchange", "launch.py").end()
    assert status != 0
    assert first == "five steps" and line.startswith(f"error: rank 1 ({HOST}) ")
    assert "killed" in line


# --- 3. signals -----------------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["torchrun"]))
def test_sigusr1_saves_and_sigterm_saves_and_stops(launcher: str, start: Start) -> None:
    job = start("loop", launcher)
    job.wait_for("five steps")
    job.rank(1).send_signal(signal.SIGUSR1)
    job.wait_for("saved at step")
    job.rank(1).send_signal(signal.SIGTERM)
    status, lines = job.end()
    assert status == 0
    assert [line.split(" at ")[0] for line in lines] == ["five steps", "saved", "stopped"]


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["torchrun"]))
def test_a_second_sigterm_ends_at_once(launcher: str, start: Start) -> None:
    job = start("stuck", launcher)
    job.wait_for("five steps")
    time.sleep(0.5)  # rank 0 waits in a collective now
    first = job.rank(0)
    first.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert is_alive(first), "it waits for the step to end"
    first.send_signal(signal.SIGTERM)
    wait_until(lambda: not is_alive(first), 5, "it goes on", 0.05)
    status, lines = job.end(LAUNCHER_SECONDS)
    assert status != 0 and lines[1:] == [f"rank 0 ({HOST}): ended by SIGTERM"]


@THOROUGH
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ctrl_c_ends_at_once(launcher: str, start: Start) -> None:
    job = start("stuck", launcher)
    job.wait_for("five steps")
    os.killpg(job.launcher.pid, signal.SIGINT)
    status, lines = job.end(LAUNCHER_SECONDS)
    assert status != 0 and lines[1:] == ["interrupted"]


# --- 4. ranks end with their launcher -------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(["deepspeed", *LAUNCHERS], ["launch.py"]))
def test_ranks_end_with_their_launcher(launcher: str, start: Start) -> None:
    job = start("stuck", launcher)
    job.wait_for("five steps")
    job.launcher.kill()
    _, lines = job.end(LAUNCHER_SECONDS)
    deepspeed_gone = f"error: the deepspeed command that started rank 0 ({HOST}) has ended"
    assert lines[1:] == ([deepspeed_gone] if launcher == "deepspeed" else [])


# --- 5. hangs and silence -------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["launch.py"]))
def test_a_rank_that_hangs_is_named_with_its_frame(launcher: str, start: Start) -> None:
    job = start("hang", launcher)
    status, (_, *positions, error) = job.end()
    assert status == 1
    assert [line.split(" in step 10 for ")[0] for line in positions[1:]] == [f"rank 1 ({HOST})"], (
        positions
    )
    assert re.match(rf"rank 0 \({HOST}\) in step 11 for \d+ s, at all_reduce", positions[0])
    assert "at fail_or_hang, called by _run_main (zero_tp/run/process/lifecycle.py:" in positions[1]
    limit = r"0\.0333 minutes \(the limit: zero_tp\.training\.timeout_minutes\)"
    assert re.fullmatch(
        rf"error: no progress in step 1[01] for {limit}: rank 0 waits for rank 1", error
    )


@THOROUGH
def test_a_rank_that_waits_for_rows_names_the_expert_group(start: Start) -> None:
    status, (_, first, second, error) = start("hang in an exchange", "launch.py").end()
    assert status == 1
    at = r"at wait \(zero_tp/parallel/.*\) in the expert group of ranks 0 and 1"
    assert re.fullmatch(rf"rank 0 \({HOST}\) in step 10 for \d+ s, {at}", first)
    assert re.match(rf"rank 1 \({HOST}\) in step 10 for \d+ s, at exchange", second)
    assert "expert group" not in second and error.endswith(": rank 0 waits for rank 1")


SILENCE = [
    ("launch.py", 1, "error: no heartbeat from rank 1"),
    ("torchrun", 1, "error: no heartbeat from rank 1"),
    ("torchrun", 0, "error: no heartbeat from rank 0"),  # the agent serves the store
    # Rank 0 serves the store.
    ("launch.py", 0, f"error: {HOST} has had no answer from the job's store"),
]


# The first tier has silence in test_watchdog.py.
@THOROUGH
@pytest.mark.parametrize(("launcher", "silent", "error"), SILENCE)
def test_silence_of_a_rank_or_of_the_store_ends_the_job(
    launcher: str, silent: int, error: str, start: Start
) -> None:
    job = start("silence", launcher)
    job.wait_for("five steps")
    stopped = job.rank(silent)
    stopped.suspend()
    job.wait_for(error)
    stopped.kill()  # the launcher would wait for 30 s
    assert job.end()[0] != 0


# --- 6. restarts ----------------------------------------------------------------------------------


@THOROUGH
def test_torchrun_restarts_a_job(start: Start) -> None:
    job = start("restart", "torchrun", "--standalone", "--max-restarts", "1")
    job.wait_for(f"rank 1 ({HOST}): ArithmeticError")
    wait_until(
        lambda: job.log.read_text().count("five steps") == 2, 60, "it was not started again", 0.1
    )
    job.rank(0).send_signal(signal.SIGTERM)
    assert job.end()[0] == 0


# --- 7. one writer --------------------------------------------------------------------------------


@THOROUGH
@pytest.mark.parametrize("launcher", in_tiers(LAUNCHERS, ["launch.py"]))
def test_a_second_launch_on_a_machine_is_refused(
    launcher: str, start: Start, tmp_path: Path
) -> None:
    with run_directory(tmp_path / "run"):
        status, lines = start("writer", launcher).end()
    assert status == (1 if launcher == "torchrun" else 2)
    assert lines == [
        "error: run: another run is writing there; wait for it, or give another --output-dir"
    ]


def test_a_launch_on_another_machine_takes_the_run_over(tmp_path: Path) -> None:
    with run_directory(tmp_path) as owner:
        owner.check()
        RunOwner(tmp_path)  # a launch on another machine, where the lock does nothing
        with pytest.raises(OwnerChanged, match="has taken the run over"):
            owner.check()
