"""The parts of a rank's lifecycle that need no launcher: how one process ends, and the ranks of one machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.support.launched import default_interrupts
from tests.support.waits import patience, wait_until
from zero_tp.process.environment import RankEnvironment, is_alive
from zero_tp.process.lifecycle import _looks_like_a_lost_peer
from zero_tp.process.node import NodeWatch, describe_killed

ROOT = Path(__file__).parents[2]
HOST = socket.gethostname()
PRELUDE = """
import sys, time, threading, atexit
from zero_tp.errors import UserError
from zero_tp.process.lifecycle import run_rank
"""


def start(body: str, directory: Path, launcher: str = "", **variables: str) -> subprocess.Popen[str]:
    """A process whose main is `body`, alone or started by a process that runs `launcher` with its path as argument."""
    script = directory / "alone.py"
    script.write_text(
        PRELUDE + "def main():\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "run_rank(main, False)\n"
    )
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **variables}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *(["-c", launcher] if launcher else []), str(script)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        preexec_fn=default_interrupts,
    )


@pytest.mark.parametrize(("accelerator", "shown"), [("cpu", ""), ("cuda", "0,1")])
def test_a_rank_on_cpu_sees_no_cuda_device(tmp_path: Path, accelerator: str, shown: str) -> None:
    """DeepSpeed's launcher sets the variable on every accelerator (`set_visible_devices_envs`)."""
    body = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    process = start(body, tmp_path, DS_ACCELERATOR=accelerator, CUDA_VISIBLE_DEVICES="0,1")
    said, complained = process.communicate(timeout=patience(45))
    assert (process.returncode, said, complained) == (0, f"{shown}\n", "")


@pytest.mark.parametrize(
    ("body", "status", "out", "last"),
    [
        ("return None", 0, "", ""),
        ("return 3", 3, "", ""),
        ("atexit.register(print, 'flushed'); print('work', end=' ')", 0, "work flushed\n", ""),
        ("sys.exit(4)", 4, "", ""),
        ("sys.exit('no such file')", 1, "", "error: no such file"),
        ("raise UserError('steps is -1:\\nat least 1')", 2, "", "error: steps is -1: at least 1"),
        ("raise KeyboardInterrupt", 130, "", "interrupted"),
        ("{}['key']", 1, "", f"rank 0 ({HOST}): KeyError: 'key'"),
        ("threading.Thread(target=time.sleep, args=(60,)).start()", 0, "", ""),
        ("open('/no/such/file')", 2, "", "error: /no/such/file: No such file or directory"),
        ("sys.stderr.close(); raise UserError('unheard')", 2, "", ""),
    ],
)
def test_how_a_process_ends(tmp_path: Path, body: str, status: int, out: str, last: str) -> None:
    process = start(body, tmp_path)
    said, complained = process.communicate(timeout=patience(45))
    assert (process.returncode, said) == (status, out)
    assert (complained.splitlines() or [""])[-1] == last
    assert "lifecycle.py" not in complained
    assert last.startswith("rank") or complained.count("\n") <= 1


@pytest.mark.parametrize(
    ("number", "status", "text"),
    [(signal.SIGTERM, 143, f"rank 0 ({HOST}): ended by SIGTERM\n"), (signal.SIGINT, 130, "interrupted\n")],
)
def test_signals_while_the_main_thread_waits_in_c(
    tmp_path: Path, number: signal.Signals, status: int, text: str
) -> None:
    process = start("print('up', flush=True)\nthreading.Lock().acquire() and threading.Event().wait()", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(number)
    _, complained = process.communicate(timeout=patience(45))
    assert (process.returncode, complained) == (status, text)


LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])"


@pytest.mark.parametrize("wait", ["time.sleep(300)", "import ctypes; ctypes.PyDLL(None).sleep(300)"])
def test_a_rank_ends_with_its_launcher(tmp_path: Path, wait: str) -> None:
    """Also where C code holds the interpreter's lock."""
    launcher = start(f"print('up', flush=True)\n{wait}", tmp_path, LAUNCHER, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    [rank] = psutil.Process(launcher.pid).children(recursive=True)
    try:
        launcher.kill()
        wait_until(lambda: not is_alive(rank), 10, "a rank outlives its launcher", 0.02)
        assert launcher.communicate() == ("", "")
    finally:
        if is_alive(rank):
            rank.kill()


def test_a_forked_child_keeps_its_signals_to_itself(tmp_path: Path) -> None:
    body = """import os, signal
child = os.fork()
if child == 0:
    time.sleep(30)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""
    process = start(body, tmp_path)
    out, complained = process.communicate(timeout=patience(25))
    assert (process.returncode, out, complained) == (0, "-15\n", "")


def test_a_launched_rank_knows_its_parent() -> None:
    launched = RankEnvironment.of_this_process({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"})
    assert launched.parent is not None and launched.parent.pid == os.getppid()
    alone = RankEnvironment.of_this_process({})
    assert (alone.rank, alone.world, alone.parent, alone.runner()) == (0, 1, None, None)


def test_a_rank_that_was_killed_is_named_by_the_lowest_that_is_left(capfd: pytest.CaptureFixture[str]) -> None:
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    ranks = [subprocess.Popen(sleeping, env={"RANK": str(rank)}) for rank in range(4, 8)]
    ended: list[str] = []

    def watch(rank: int) -> NodeWatch:
        environment = RankEnvironment(rank, 8, rank - 4, 4, parent=psutil.Process())
        return NodeWatch(environment, lambda: ended.append("runner"))

    try:
        lowest, other = watch(4), watch(5)
        for node in (lowest, other):
            node.start()
        wait_until(lambda: lowest.all_running() and other.all_running(), 20, "the ranks were not found", 0.02)
        ranks[2].kill()
        wait_until(lambda: lowest.ended() and other.ended(), 10, "the killed one was not missed", 0.02)
        assert lowest.ended() == {6: -9} and not lowest.all_running()
        ranks[3].terminate()  # by its launcher
        wait_until(lambda: 7 in lowest.ended(), 10, "the other was not missed", 0.02)
        time.sleep(0.3)
        for node in (lowest, other):
            node.report_killed(unseen=True)
        assert capfd.readouterr().err == f"error: rank 6 ({HOST}) was killed by SIGKILL; out of memory?\n"
        assert not ended
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.parametrize("failed", [False, True])
def test_a_rank_whose_end_nobody_saw_is_named_but_for_torchruns_error_file(
    failed: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "error.json"
    variables = {"RANK": "1", "TORCHELASTIC_ERROR_FILE": str(file)}
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=variables)
    watch = NodeWatch(RankEnvironment(0, 2, 0, 2, parent=psutil.Process()), lambda: None)
    wait_until(watch._find_ranks, 20, "the rank was not found", 0.02)
    if failed:
        file.touch()
    rank.kill()
    rank.wait()  # reaped before anyone looks
    assert watch.ended() == {1: 1 if failed else None}
    watch.report_killed()
    assert capfd.readouterr().err == ""
    watch.report_killed(unseen=True)
    line = f"error: rank 1 ({HOST}) has ended; if it printed no error, it was killed (out of memory?)\n"
    assert capfd.readouterr().err == ("" if failed else line)


def test_ends_in_words() -> None:
    assert describe_killed(1, -9) == f"rank 1 ({HOST}) was killed by SIGKILL; out of memory?"
    assert describe_killed(1, -11) == f"rank 1 ({HOST}) was killed by SIGSEGV"
    assert describe_killed(1, -15) == describe_killed(1, 1) == ""


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (dist.DistNetworkError("the client socket has failed"), True),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2417"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
        (MemoryError(), False),
    ],
)
def test_errors_that_may_be_echoes(error: BaseException, lost: bool) -> None:
    assert _looks_like_a_lost_peer(error) == lost


def test_an_echo_inside_another_error() -> None:
    outer = ValueError("saving failed")
    outer.__cause__ = RuntimeError("Connection closed by peer")
    assert _looks_like_a_lost_peer(outer)
