"""How the process of one rank ends, without a launcher. test_promises.py has the ranks of a job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.support.launched import ROOT, default_interrupts
from tests.support.waits import patience, wait_until
from zero_tp.run.process.environment import is_alive
from zero_tp.run.process.lifecycle import _may_be_lost_peer

HOST = socket.gethostname()
PRELUDE = """
import atexit, os, signal, sys, threading, time
from zero_tp.base.errors import UserError
from zero_tp.run.process.lifecycle import run_rank
"""


def start(
    body: str, directory: Path, launcher: str = "", **variables: str
) -> subprocess.Popen[str]:
    """Start a process whose main is `body`. If there is a `launcher`, it runs and gets the
    script's path.
    """
    script = directory / "rank.py"
    script.write_text(
        PRELUDE
        + "def main():\n"
        + "".join(f"    {line}\n" for line in body.splitlines())
        + "run_rank(main, False)\n"
    )
    drop = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS")
    environment = {key: value for key, value in os.environ.items() if key not in drop}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(directory), **variables}
    return subprocess.Popen(
        [sys.executable, *(["-c", launcher] if launcher else []), str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=default_interrupts,
    )


SEND = "threading.Timer(0.2, os.kill, (os.getpid(), signal.{})).start(); threading.Event().wait()"
"""A signal arrives while the main thread waits in C."""
FORK = """child = os.fork()
if child == 0:
    time.sleep(30)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"""


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
        (SEND.format("SIGTERM"), 143, "", f"rank 0 ({HOST}): ended by SIGTERM"),
        (SEND.format("SIGINT"), 130, "", "interrupted"),
        (FORK, 0, "-15\n", ""),  # a forked child has the default actions
    ],
)
def test_how_a_process_ends(tmp_path: Path, body: str, status: int, out: str, last: str) -> None:
    process = start(body, tmp_path)
    output, errors = process.communicate(timeout=patience(45))
    assert (process.returncode, output) == (status, out)
    assert (errors.splitlines() or [""])[-1] == last
    assert "lifecycle.py" not in errors
    assert (last.startswith("rank 0") and "KeyError" in last) or errors.count("\n") <= 1


@pytest.mark.parametrize(("accelerator", "visible"), [("cpu", ""), ("cuda", "0,1")])
def test_a_rank_on_cpu_sees_no_cuda_device(tmp_path: Path, accelerator: str, visible: str) -> None:
    """DeepSpeed's launcher sets the variable on every accelerator (`set_visible_devices_envs`)."""
    body = "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    process = start(body, tmp_path, DS_ACCELERATOR=accelerator, CUDA_VISIBLE_DEVICES="0,1")
    output, errors = process.communicate(timeout=patience(45))
    assert (process.returncode, output, errors) == (0, f"{visible}\n", "")


def test_a_rank_ends_with_its_launcher_while_c_code_holds_the_interpreters_lock(
    tmp_path: Path,
) -> None:
    launcher = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])"
    body = "print('up', flush=True)\nimport ctypes; ctypes.PyDLL(None).sleep(300)"
    process = start(body, tmp_path, launcher, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    [rank] = psutil.Process(process.pid).children(recursive=True)
    try:
        process.kill()
        wait_until(lambda: not is_alive(rank), 10, "a rank outlives its launcher", 0.02)
        assert process.communicate() == ("", "")
    finally:
        if is_alive(rank):
            rank.kill()


def caused_by(cause: BaseException) -> BaseException:
    error = ValueError("saving failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (dist.DistBackendError("NCCL error: remote process exited"), True),
        (dist.DistNetworkError("the client socket has failed"), True),
        (
            RuntimeError(
                "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2417"
            ),
            True,
        ),
        (
            RuntimeError(
                "[gloo/transport/tcp/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv"
            ),
            True,
        ),
        (ConnectionResetError("Connection reset by peer"), True),
        (caused_by(RuntimeError("Connection closed by peer")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("connection closed by peer"), False),
        (MemoryError(), False),
    ],
)
def test_errors_that_may_come_from_a_lost_peer(error: BaseException, lost: bool) -> None:
    assert _may_be_lost_peer(error) == lost
