"""Every command ends through `run` and reports bad arguments through `Parser`; ranks end by `process.lifecycle`."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from zero_tp.errors import BAD_INPUT, INTERRUPTED, UserError, error_line, of_a_file, show_visibly
from zero_tp.process.signals import read_signals

BROKEN_PIPE, TERMINATED = 141, 143  # 128 + SIGPIPE, 128 + SIGTERM
END_SECONDS = 5.0  # from a signal on


class Parser(argparse.ArgumentParser):
    """A Parser reports bad arguments as one `UserError` line instead of the usage text and a line.

    It shows texts as they are written, and takes options by their whole names.
    """

    def __init__(self, prog: str | None = None, **options: Any):
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog or f"python {sys.argv[0]}", allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} ({self.prog} --help explains the arguments)")


def check_writable(directory: Path) -> None:
    """Make a directory, and check that it takes files, before the long work whose results go there.

    Raises:
        UserError: it can't be made, or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise UserError(f"{directory}: can't be written ({error.strerror}); give another path") from error


def run(main: Callable[[], int | None]) -> NoReturn:
    """Run a command and end the process with its exit status (None: 0).

    It ends with status 2 and one line `error: …` on stderr after a `UserError` or a system's error that names a file,
    with 130 after Ctrl-C, with 143 after SIGTERM and with 141 when the reader of standard output has gone (`… | head`),
    these without a traceback and each after what it has begun to write is cleaned up. A command that has not ended 5 s
    after a signal, because a library does not return, is killed. C code that holds the interpreter's lock delays this.
    Every other exception is a fault of ours and keeps its traceback.
    """
    signal.signal(signal.SIGTERM, _terminate)
    read_signals(_kill_later)
    show_visibly()
    try:
        status = main() or 0
        sys.stdout.flush()
    except UserError as error:
        print(error_line(error), file=sys.stderr)
        status = BAD_INPUT
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _stdout_reader_gone():
            # The interpreter flushes stdout once more at exit; give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = BROKEN_PIPE
        elif (told := of_a_file(error)) is not None:
            print(error_line(told), file=sys.stderr)
            status = BAD_INPUT
        else:
            raise  # another pipe or socket: a real fault
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(TERMINATED)


def _kill_later(numbers: set[int]) -> None:
    """Kill this process some time after SIGINT or SIGTERM: Python's handlers wait until a library's call returns."""
    if {signal.SIGINT, signal.SIGTERM} & numbers:
        time.sleep(END_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)


def _stdout_reader_gone() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
