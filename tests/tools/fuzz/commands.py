"""Run a command of launch/ or eval/ in a forked child, and check what every command promises."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.support.launched import ROOT
from tests.support.waits import patience
from zero_tp.base.errors import BAD_INPUT, visible
from zero_tp.commands.check import MISSING

LIMIT = 20.0  # seconds on an idle machine
LONGEST_REFUSAL, LONGEST_WORD = 400, 60  # characters
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAYON_NUM_THREADS": "1",
}
PERPLEXITY = (
    *(
        "--tasks",
        "perplexity",
        "--data",
        "perplexity=text.txt",
        "--device",
        "cpu",
        "--batch-size",
        "1",
    ),
    *("--output", "report.json"),
)
"""Arguments of eval/zero_shot.py besides its model."""


@dataclass(frozen=True)
class Ended:
    """A command has ended: with this exit status (minus a signal's number; None where it was still
    running at the limit), having printed this.
    """

    status: int | None
    out: str
    err: str
    seconds: float


def run(
    script: str,
    arguments: Sequence[str],
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> Ended:
    """Run `python SCRIPT ARGUMENTS` in `directory`, in a fork of this process: what it has imported
    costs nothing.

    Nothing that starts threads (a tokenizer, a large sum of torch) may have run in this process
    before.

    Args:
        script: its path from the repository's root.
        environment: variables to set besides ENVIRONMENT.
        limit: seconds until it is killed, on an idle machine.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        begin = time.monotonic()
        child = os.fork()
        if child == 0:
            _become(script, arguments, directory, environment or {}, out.fileno(), err.fileno())
        status = _wait(child, begin, limit)
        return Ended(status, _text(out), _text(err), time.monotonic() - begin)


def start(
    script: str,
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    errors: Path,
) -> int:
    """Start a command as `run` does, and return its process's number; its stderr is added to a
    file.
    """
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        _become(
            script,
            arguments,
            directory,
            environment,
            nowhere,
            os.open(errors, os.O_WRONLY | os.O_APPEND),
        )
    return child


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode("utf-8", "backslashreplace")


def _become(
    script: str,
    arguments: Sequence[str],
    directory: Path,
    environment: Mapping[str, str],
    out: int,
    err: int,
) -> None:
    """Be the command, and end this process with its status."""
    status = 1
    try:
        os.setsid()
        os.chdir(directory)
        os.environ.update({**ENVIRONMENT, **environment})
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (err, 2)):
            os.dup2(descriptor, target)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", closefd=False),
            os.fdopen(2, "w", buffering=1, closefd=False),
        )
        sys.argv = [str(ROOT / script), *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # what the interpreter would print
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)


def _wait(child: int, begin: float, limit: float) -> int | None:
    while time.monotonic() - begin < patience(limit):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def attempt(
    what: str,
    script: str,
    arguments: Sequence[str],
    directory: Path,
    *,
    check: bool = False,
    **options: Any,
) -> Ended | None:
    """Run a command and hold it to what every command promises → None where it refused its input.

    Raises:
        AssertionError: with `what`, the promise that was broken.
    """
    ended = run(script, arguments, directory, **options)
    problem = broken_promise(ended, check=check)
    assert problem is None, f"{what}: {script} {problem}"
    return None if ended.status == BAD_INPUT else ended


def broken_promise(ended: Ended, *, check: bool = False) -> str | None:
    """Return what the command has done that none may, or None: it ended by itself, in time, with
    status 0 or with status 2 and a line `error: …` for each mistake, which a terminal can show, and
    no traceback.

    Args:
        check: it is a check, which has status 1 if something is missing.
    """
    if ended.status is None:
        return f"was still running after {ended.seconds:.0f} s"
    if "Traceback (most recent call last)" in ended.err + ended.out:
        return f"ended with a traceback: {ended.err[-1500:]}"
    if ended.status not in (0, BAD_INPUT, *([MISSING] if check else [])):
        return f"ended with status {ended.status}: {ended.err[-500:]}"
    printed = (ended.err + ended.out).replace("\r", "\n")
    if visible(printed) != printed:
        return f"printed control characters: {ended.err[-500:]!r}"
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    # A file's mistakes are named at once, each in a line of its own.
    distinct = bool(errors) and len(set(errors)) == len(errors)
    if ended.status == BAD_INPUT and not (
        distinct and ended.err.rstrip().endswith("\n".join(errors))
    ):
        return f"ended with status {BAD_INPUT} without lines `error: …`: {ended.err[-500:]}"
    return next(filter(None, (broken_style(line.removeprefix("error: ")) for line in errors)), None)


def broken_style(refusal: str) -> str | None:
    """Return what is wrong with the text of a refusal, or None if it is short.

    A path or a value without blanks counts as `LONGEST_WORD` characters at most: its length is the
    user's.
    """
    length = len(re.sub(rf"(\S{{{LONGEST_WORD}}})\S+", r"\1", refusal))
    return f"its refusal has {length:,} characters: {refusal}" if length > LONGEST_REFUSAL else None


def scratch() -> Path:
    """Make a directory that is there until this process ends, whatever its forks do at their
    ends.
    """
    directory, owner = Path(tempfile.mkdtemp(prefix="zero_tp-fuzz-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def in_a_child(work: Callable[[], None]) -> None:
    """Do what starts threads: none may have run in the process that forks commands."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the base of all cases could not be made"
