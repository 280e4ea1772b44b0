"""How a command ends: status, what is on stderr, no traceback where a person is at fault."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launched import default_interrupts
from tests.waits import patience, wait_until

ROOT = Path(__file__).parents[2]


def script(body: str, before: str = "") -> list[str]:
    indented = "\n".join("    " + line for line in body.splitlines())
    imports = "import time\nfrom zero_tp import cli\nfrom zero_tp.errors import UserError"
    return [sys.executable, "-c", f"{imports}\ndef main():\n{indented}\n{before}\ncli.run(main)"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("pass", 0, ""),
        ("return 7", 7, ""),
        ("raise UserError('a.json: wrong\\n  key')", 2, "error: a.json: wrong key\n"),
        ("open('no' * 200)", 2, f"error: {'no' * 200}: File name too long\n"),
        ("cli.Parser().parse_args(['--x'])", 2, "error: unrecognized arguments: --x (python -c --help explains the "),
    ],
)
def test_status_and_message(body: str, status: int, error: str) -> None:
    done = subprocess.run(script(body), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith(error) and done.stderr.count("\n") == bool(error)


def test_what_a_terminal_would_obey_is_shown() -> None:
    replaced = "import os, sys\nsys.stdout = os.fdopen(1, 'w', closefd=False)\n"
    own = [*script("print('heard')")[:2], replaced + script("import gc; gc.collect(); print('heard')")[2]]
    assert subprocess.run(own, cwd=ROOT, capture_output=True, check=True).stdout == b"heard\n"
    done = subprocess.run(script(r"print('a\tb\x1b[31m\r\udcff', 'é')"), cwd=ROOT, capture_output=True, check=True)
    assert done.stdout.decode() == "a\tb\\x1b[31m\\r\\udcff é\n"


@pytest.mark.parametrize("body", ["raise ValueError('ours')", "raise BrokenPipeError('a socket')"])
def test_our_own_faults_keep_their_traceback(body: str) -> None:
    done = subprocess.run(script(body), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(("option", "value"), [("tokens", -1), ("tokens", 0), ("top-k", -5), ("seed", 2**32)])
def test_a_sample_of_no_such_size_is_one_line(tmp_path: Path, option: str, value: int) -> None:
    words = ["--model", str(tmp_path), "--prompt", "x", f"--{option}", str(value)]
    done = subprocess.run([sys.executable, "launch/sample.py", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --{option} {value}: from ") and done.stderr.count("\n") == 1


def test_interrupt() -> None:
    process = subprocess.Popen(
        script("print('up', flush=True)\ntime.sleep(60)"),
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
        text=True,
        preexec_fn=default_interrupts,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=patience(30))
    assert (process.returncode, error) == (130, "interrupted\n")


HELD = "sum(range(10**12))"
"""C code that returns after hours and never gives the interpreter's lock back."""
WORKERS = """\
from functools import partial
from zero_tp.data.work import in_order
list(in_order(partial(partial, sum), [range(10**12)] * 2, 2))"""


@pytest.mark.parametrize(("body", "number"), [(HELD, signal.SIGTERM), (WORKERS, signal.SIGINT)])
def test_a_signal_ends_a_command_that_a_library_holds(body: str, number: signal.Signals) -> None:
    process = subprocess.Popen(
        script(f"print('up', flush=True)\n{body}", "cli.END_SECONDS = 0.5"),
        cwd=ROOT,
        stdout=-1,
        stderr=-1,
        preexec_fn=default_interrupts,
    )
    assert process.stdout is not None
    process.stdout.readline()
    command = psutil.Process(process.pid)
    begun = command.cpu_times().user

    def held() -> bool:
        workers = [each for each in command.children() if "spawn_main" in " ".join(each.cmdline())]
        return len(workers) == 2 if body == WORKERS else command.cpu_times().user > begun + 0.2

    wait_until(held, 60, "nothing is held", 0.05)
    everyone = [command, *command.children(recursive=True)]
    process.send_signal(number)
    process.communicate(timeout=patience(30))
    assert process.returncode == -signal.SIGKILL
    assert not psutil.wait_procs(everyone, timeout=patience(10))[1], "nothing is left behind"


def test_a_command_leaves_nobody_behind_and_its_children_s_signals_are_their_own() -> None:
    body = """\
import os, signal
ready, up = os.pipe()
if os.fork() == 0:
    os.write(up, b'.')
    time.sleep(60)
os.read(ready, 1)
watcher, child = open(f'/proc/self/task/{os.getpid()}/children').read().split()
os.kill(int(child), signal.SIGTERM)
os.waitpid(int(child), 0)
time.sleep(1)
print(watcher)"""
    done = subprocess.run(script(body, "cli.END_SECONDS = 0.1"), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not psutil.pid_exists(int(done.stdout)), done.stderr


@pytest.mark.parametrize("lines", [1, 100_000])
def test_reader_gone(lines: int) -> None:
    process = subprocess.Popen(
        script(f"input()\nfor _ in range({lines}): print('text')"), cwd=ROOT, stdin=-1, stdout=-1, stderr=-1, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate("go\n", timeout=patience(30))
    assert (process.returncode, error) == (141, "")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_under_standard_output_is_one_line(lines: int) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            script(f"for _ in range({lines}): print('text')"), cwd=ROOT, stdout=full, stderr=-1, text=True
        )
    assert (process.returncode, process.stderr) == (2, "error: standard output: No space left on device\n")
