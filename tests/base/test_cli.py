"""How a command ends: status, what is on stderr, no traceback where a person is at fault."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import launched
from tests.support.launched import default_interrupts
from tests.support.waits import patience


def script(body: str, before: str = "") -> list[str]:
    indented = "\n".join("    " + line for line in body.splitlines())
    imports = "import time\nfrom zero_tp.base import cli\nfrom zero_tp.base.errors import UserError"
    return [sys.executable, "-c", f"{imports}\ndef main():\n{indented}\n{before}\ncli.run(main)"]


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ("pass", 0, ""),
        ("return 7", 7, ""),
        ("raise UserError('a.json: wrong\\n  key')", 2, "error: a.json: wrong key\n"),
        ("open('no' * 200)", 2, f"error: {'no' * 200}: File name too long\n"),
        (
            "parser = cli.Parser(); parser.add_argument('--output'); "
            "parser.parse_args(['--ouput=x'])",
            2,
            "error: unrecognized arguments: --ouput=x (did you mean --output? python -c --help "
            "explains the ",
        ),
        (
            "cli.Parser().parse_args(['--x'])",
            2,
            "error: unrecognized arguments: --x (python -c --help explains the ",
        ),
    ],
)
def test_status_and_message(body: str, status: int, error: str) -> None:
    done = subprocess.run(script(body), capture_output=True, text=True)
    assert done.returncode == status
    assert done.stderr.startswith(error) and done.stderr.count("\n") == bool(error)


def test_what_is_no_utf_8_is_printed_escaped() -> None:
    done = subprocess.run(script(r"print('a\udcff', 'é')"), capture_output=True, check=True)
    assert done.stdout.decode() == "a\\udcff é\n"


@pytest.mark.parametrize("body", ["raise ValueError('ours')", "raise BrokenPipeError('a socket')"])
def test_our_own_faults_keep_their_traceback(body: str) -> None:
    done = subprocess.run(script(body), capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"), [("tokens", -1), ("tokens", 0), ("top-k", -5), ("seed", 2**32)]
)
def test_a_sample_of_no_such_size_is_one_line(tmp_path: Path, option: str, value: int) -> None:
    done = launched.script(
        "launch/sample.py", tmp_path, "--model", ".", "--prompt", "x", f"--{option}", str(value)
    )
    assert done.returncode == 2
    assert (
        done.stderr.startswith(f"error: --{option} {value}: is out of range; give a number from ")
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("number", "status", "error"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "")],
)
def test_a_signal_ends_a_command_that_cleans_up(number: int, status: int, error: str) -> None:
    body = (
        "try:\n    print('up', flush=True)\n    time.sleep(60)\nfinally:\n    print('cleaned up')"
    )
    command = script(body)
    process = subprocess.Popen(
        command, stdout=-1, stderr=-1, text=True, preexec_fn=default_interrupts
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    assert (
        process.communicate(timeout=patience(30)) == ("cleaned up\n", error)
        and process.returncode == status
    )


@pytest.mark.parametrize("lines", [1, 100_000])
def test_reader_gone(lines: int) -> None:
    process = subprocess.Popen(
        script(f"input()\nfor _ in range({lines}): print('text')"),
        stdin=-1,
        stdout=-1,
        stderr=-1,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, error = process.communicate("go\n", timeout=patience(30))
    assert (process.returncode, error) == (141, "")


def test_a_closed_standard_output_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", '"$@" >&-', "bash", *script("print('text')")], stderr=-1, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_full_disk_under_standard_output_is_one_line(lines: int) -> None:
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            script(f"for _ in range({lines}): print('text')"), stdout=full, stderr=-1, text=True
        )
    assert (process.returncode, process.stderr) == (2, "error: No space left on device\n")
