"""A run's directory keeps all that its ranks print, below the command that started them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.launched import environment

PROGRAM = """
import os, sys
from pathlib import Path
from zero_tp.process.console import Console, write_stderr
from zero_tp.process.environment import RankEnvironment

console = Console(RankEnvironment.of_this_process())
print("before there is a directory")
console.keep(Path(sys.argv[1]))
sys.stderr.write("\\r 10%|#   |")
sys.stderr.write("\\r 20%|##  |")
print("a line", "of two words", flush=True)
sys.stderr.write("\\r\\x1b[K")  # as write_stderr clears a terminal's line
write_stderr("rank 0: Traceback\\nrank 0 failed: \\x1b[31mit\\x1b[0m is told")
print("no line yet", end="", flush=True)
print(" but now", flush=True)
os.kill(os.getpid(), 9)
"""


def started(run: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", PROGRAM, str(run), "--set", "a b"]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=120)


def test_every_line_is_kept_at_once_and_starts_follow_each_other(tmp_path: Path) -> None:
    """Also where the process is killed, and no bar that is drawn over."""
    done = started(tmp_path)
    assert done.returncode == -signal.SIGKILL
    said = ["before there is a directory", "a line of two words", "no line yet but now"]
    assert done.stdout.splitlines() == said
    first, *kept = (tmp_path / "console.log").read_text().splitlines()
    assert first.startswith("=== 20") and "1 rank, in " in first and first.endswith("--set 'a b'")
    assert kept == [*said[:2], "rank 0: Traceback", "rank 0 failed: it is told", said[2]]
    started(tmp_path)
    again = (tmp_path / "console.log").read_text().splitlines()
    assert again[1 : len(kept) + 1] == kept == again[len(kept) + 2 :]


def test_what_cannot_be_written_is_told_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "console.log").mkdir()
    done = started(tmp_path)
    assert done.returncode == -signal.SIGKILL and "a line of two words" in done.stdout
    assert done.stderr.count("console.log could not be written (Is a directory); the run goes on") == 1
    full = tmp_path / "full"
    full.mkdir()
    (full / "console.log").symlink_to("/dev/full")
    done = started(full)
    assert done.returncode == -signal.SIGKILL and "but now" in done.stdout
    assert done.stderr.count("console.log could not be written (No space left on device); the run goes on") == 1
    elsewhere = started(tmp_path / "of another node")
    assert "could not be written" not in elsewhere.stderr and "a line of two words" in elsewhere.stdout
