"""Parse arguments, run a command and exit with its status. Ranks end through `process.lifecycle`
instead.
"""

from __future__ import annotations

import argparse
import difflib
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zero_tp.base.errors import (
    BAD_INPUT,
    INTERRUPTED,
    UserError,
    as_user_error,
    error_line,
    escape_unencodable_output,
    show,
)

BROKEN_PIPE, TERMINATED = 141, 143  # 128 + SIGPIPE, 128 + SIGTERM


class Parser(argparse.ArgumentParser):
    """Report bad arguments as one `UserError` line, without the usage text.

    Descriptions are shown as they are written, and options can't be abbreviated.
    """

    def __init__(self, prog: str | None = None, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # No abbreviations: a script that uses one would break as soon as another option has the
        # same beginning.
        super().__init__(prog or f"python {sys.argv[0]}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        unknown = next(
            (word.partition("=")[0] for word in message.split() if word.startswith("--")), ""
        )
        options = self._option_string_actions if message.startswith("unrecognized") else ()
        near = difflib.get_close_matches(unknown, options, n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{message} ({suggestion}{self.prog} --help explains the arguments)")


def check_writable(directory: Path) -> None:
    """Make a directory and check that it is writable, before long work whose results go there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # By writing a file, because permission bits say nothing about a file system that is mounted
        # read-only.
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(
            f"{directory}: can't be written ({error.strerror}); give another path"
        ) from error


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit status (None: 0).

    A `UserError`, a full disk or an OSError that names a file prints one line `error: …` on stderr;
    the status is 2. The status is 130 after Ctrl-C, 143 after SIGTERM, and 141 if the reader of
    standard output has closed (`… | head`). Every other exception is a bug and keeps its traceback.
    """
    signal.signal(signal.SIGTERM, _terminate)
    escape_unencodable_output()
    try:
        status = main() or 0
        # Flushed here: a full disk or a closed pipe then has its own exit status, instead of a
        # traceback at the interpreter's exit.
        if sys.stdout is not None:  # None: closed by the shell, `>&-`
            sys.stdout.flush()
    except UserError as error:
        status = _refuse(error)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _stdout_reader_gone():
            status = BROKEN_PIPE
        elif (user_error := as_user_error(error)) is not None:
            status = _refuse(user_error)
        else:
            raise  # another pipe or socket: a bug
        # Stdout is broken or full, and the interpreter flushes it again at exit.
        if error.filename is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        show("interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def _refuse(error: UserError) -> int:
    show(*map(error_line, error.errors), file=sys.stderr)
    return BAD_INPUT


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that `finally` blocks remove what the command was writing.
    sys.exit(TERMINATED)


def _stdout_reader_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    # A pipe without a reader has POLLERR (poll(2)).
    return any(event & select.POLLERR for _, event in poll.poll(0))
