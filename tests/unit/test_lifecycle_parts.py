"""The parts of a rank's lifecycle that need no launcher: who it is, who speaks, how one process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.launched import default_interrupts
from tests.waits import patience, wait_until
from zero_tp.process.environment import RankEnvironment, Siblings, describe_end, is_alive
from zero_tp.process.first_word import FirstWord
from zero_tp.process.lifecycle import STUCK_SECONDS, _looks_like_a_lost_peer

ROOT = Path(__file__).parents[2]
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
        ("{}['key']", 1, "", "rank 0 failed: KeyError: 'key'"),
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
    [(signal.SIGTERM, 143, "rank 0: ended by SIGTERM\n"), (signal.SIGINT, 130, "interrupted\n")],
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


@pytest.mark.parametrize(
    ("wait", "seconds", "said"),
    [
        ("time.sleep(300)", 0.0, "error: the launcher above rank 0 (process {pid}) is gone\n"),
        pytest.param(  # holds the interpreter's lock
            *("import ctypes; ctypes.PyDLL(None).sleep(300)", STUCK_SECONDS, ""), marks=pytest.mark.thorough
        ),
    ],
)
def test_a_rank_ends_after_its_launcher(tmp_path: Path, wait: str, seconds: float, said: str) -> None:
    launcher = start(f"print('up', flush=True)\n{wait}", tmp_path, LAUNCHER, RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    assert launcher.stdout is not None and launcher.stdout.readline() == "up\n"
    below = psutil.Process(launcher.pid).children(recursive=True)
    assert len(below) == 2, "the rank and what kills it"
    time.sleep(0.2)  # it holds the lock now
    try:
        launcher.kill()
        took = wait_until(lambda: not any(map(is_alive, below)), seconds + 15, "a rank outlives its launcher", 0.1)
        assert took >= seconds
        assert launcher.communicate() == ("", said.format(pid=launcher.pid))
    finally:
        for process in filter(is_alive, below):
            process.kill()


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


def test_only_the_first_speaks_and_a_dead_launch_does_not_matter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    first, second = FirstWord("job", now, tmp_path), FirstWord("job", now, tmp_path)
    assert not second.said()
    assert first.say("mine") and second.said() and not second.say("not mine")
    assert FirstWord("other job", now, tmp_path).say("another")
    assert FirstWord("job", now + 60, tmp_path).say("a minute later")
    assert capsys.readouterr().err.splitlines() == ["mine", "another", "a minute later"]
    old = tmp_path / "old.said"
    old.touch()
    os.utime(old, (now - 1e6, now - 1e6))
    first.say("")
    assert not old.exists()


def test_the_first_word_deletes_nothing_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another person may have put a link, or files, where it is said."""
    thesis, folder = tmp_path / "thesis", tmp_path / "folder"
    thesis.mkdir()
    folder.mkdir()
    (folder / "empty.lock").touch()
    for kept in (thesis / "chapter.tex", thesis / "old.said", folder / "chapter.tex", folder / "poetry.lock"):
        kept.write_text("years of work")
    (folder / "linked.said").symlink_to(thesis / "chapter.tex")
    for path in [*thesis.iterdir(), *folder.iterdir()]:
        os.utime(path, (1e9, 1e9), follow_symlinks=False)
    (tmp_path / "link").symlink_to(thesis)
    assert FirstWord("job", time.time(), tmp_path / "link").say("text")
    assert {path.name for path in thesis.iterdir()} == {"chapter.tex", "old.said"}
    assert FirstWord("../thesis/job", time.time(), folder).say("text")
    assert {path.name for path in folder.iterdir()} == {
        *("chapter.tex", "poetry.lock", "linked.said"),
        *(".._thesis_job.lock", ".._thesis_job.said"),
    }
    assert len(list(thesis.iterdir())) == 2
    (folder / "other.said").symlink_to(thesis / "chapter.tex")
    (folder / "other.lock").symlink_to(thesis / "chapter.tex")
    assert FirstWord("other", time.time(), folder).say("text")
    assert (thesis / "chapter.tex").stat().st_mtime == 1e9
    assert capsys.readouterr().err == "text\n" * 3


def test_said_without_a_usable_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert FirstWord("job", time.time(), tmp_path / "file" / "below").say("text")
    assert capsys.readouterr().err == "text\n"


def test_rank_environments() -> None:
    deepspeed = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "CROSS_RANK": "1", "LOCAL_SIZE": "4"}
    first = RankEnvironment.of_this_process(deepspeed)
    assert (first.rank, first.node, first.local_world, first.world) == (5, 1, 4, 8)
    assert first.parent is not None and first.parent.pid == os.getppid()
    torchrun = {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert RankEnvironment.of_this_process(torchrun).node == 1
    again = RankEnvironment.of_this_process({**torchrun, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert (
        again.job
        != RankEnvironment.of_this_process(torchrun).job
        == RankEnvironment.of_this_process({**torchrun, "RANK": "3"}).job
    )
    alone = RankEnvironment.of_this_process({})
    assert (alone.rank, alone.world, alone.parent, alone.launchers()) == (0, 1, None, {})


def test_a_job_has_one_name_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    before = RankEnvironment.of_this_process(rank).job
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1e9)  # the clock was set between two ranks' starts
    assert RankEnvironment.of_this_process({**rank, "RANK": "1"}).job == before
    assert int(before.split("-")[1]) > 0


def test_a_sibling_that_was_killed_is_known_by_rank_and_signal() -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)"], env={"RANK": str(4 + number)})
        for number in range(3)
    ]
    try:
        first = RankEnvironment(rank=4, world=8, node=1, local_rank=0, local_world=3, parent=psutil.Process(), job="")
        siblings = Siblings(first)

        def seen() -> bool:
            siblings.observe()
            return siblings.complete

        wait_until(seen, 10, "the siblings were not seen", 0.01)
        assert siblings.gone() == {}
        ranks[1].kill()
        wait_until(siblings.gone, 10, "the killed one was not missed", 0.01)
        assert siblings.gone() == {5: -9}
        ranks[1].wait()  # reaped: how it ended is no longer known
        assert siblings.gone() == {5: None}
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def test_ends_in_words() -> None:
    assert describe_end(1, -9) == "rank 1 ended without a word (killed by SIGKILL: out of memory?)"
    assert describe_end(1, -11) == "rank 1 ended without a word (killed by SIGSEGV)"
    assert describe_end(1, 250) == "rank 1 ended without a word (exit status 250)"


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
