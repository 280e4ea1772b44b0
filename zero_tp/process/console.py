"""All that a run's ranks print is also in its directory, in `console.log`, below the command that started it."""

from __future__ import annotations

import os
import re
import shlex
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import psutil

from zero_tp.errors import one_line, visible
from zero_tp.process.environment import RankEnvironment

CONSOLE = "console.log"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Console:
    """Copy the lines that this process prints to a file, until its end, which may come at any moment.

    A progress bar, which is drawn over and over, and what C code prints by itself are left out. A file that can't be
    written is reported once; the run goes on.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        """Begin to listen. Lines are held back until `keep` names the run's directory."""
        self.environment = environment
        self._file: int | None = None
        self._early: list[bytes] | None = []
        self._lock = threading.Lock()
        self._stderr = sys.stderr
        sys.stdout, sys.stderr = _CopiedStream(sys.stdout, self), _CopiedStream(sys.stderr, self)

    def keep(self, run: Path) -> None:
        """Write what was printed so far to a run's directory, and from now on each line at once.

        All ranks that see the directory append to one file, the first one after the command.
        """
        command = self._command() if self.environment.rank == 0 else ""
        with self._lock:  # other threads print too
            early, self._early = self._early or [], None
            try:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
                self._file = os.open(run / CONSOLE, flags, 0o666)
            except FileNotFoundError:  # of another node, which doesn't share the directory
                return
            except OSError as error:
                self._give_up(error)
                return
            self._write(command.encode() + b"".join(early))

    def copy(self, text: str) -> None:
        """Copy whole lines."""
        lines = (visible(_CONTROL.sub("", line.rstrip("\r").rsplit("\r", 1)[-1])) for line in text.split("\n"))
        data = "".join(f"{line}\n" for line in lines if line.strip()).encode("utf-8", "backslashreplace")
        with self._lock:
            if self._early is not None:
                self._early.append(data)
            elif self._file is not None:
                self._write(data)

    def _command(self) -> str:
        """Return the line of the command that a person typed: a launcher's, or this process' own."""
        words = sys.orig_argv
        for launcher in (self.environment.parent, self.environment.runner()):
            try:
                words = launcher.cmdline() if launcher is not None else words
            except psutil.Error:  # it is gone, or another person's
                continue
        ranks = f"{self.environment.world} rank{'s' if self.environment.world > 1 else ''}"
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return one_line(f"=== {started}, {ranks}, in {Path.cwd()}: {shlex.join(words)}") + "\n"

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        self._stderr.write(f"{CONSOLE} could not be written ({error.strerror}); the run goes on\n")


class _CopiedStream:
    """Write text to a stream, and each whole line of it to a console."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self._stream, self._console, self._unfinished = stream, console, ""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        finally:
            lines, newline, unfinished = (self._unfinished + text).rpartition("\n")
            self._unfinished = unfinished.rsplit("\r", 1)[-1]
            if newline:
                self._console.copy(lines)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def write_stderr(text: str) -> None:
    """Write lines to stderr as one piece, over a progress bar's line if one is drawn there."""
    if not text:
        return
    try:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{clear}{text}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # The terminal or pipe is gone (or stderr closed): nobody is there to read it, and the run must still end.
        return
