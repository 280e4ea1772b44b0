"""All that a run's ranks print is kept in its directory too, in `console.log`, below the command that started it."""

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
    """A console keeps the lines that this process prints, until its end, which may come at any moment.

    What was printed before the run's directory was known is kept as well. A bar that is drawn over and over is none of
    it, and neither is what C code prints by itself. A file that can't be written is told once, and costs nothing else.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        """Begin to listen."""
        self.environment = environment
        self._file: int | None = None
        self._early: list[bytes] | None = []
        self._lock = threading.Lock()
        self._stderr = sys.stderr
        sys.stdout, sys.stderr = _Kept(sys.stdout, self), _Kept(sys.stderr, self)

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

    def _command(self) -> str:
        ranks = f"{self.environment.world} rank{'s' if self.environment.world > 1 else ''}"
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return one_line(f"=== {started}, {ranks}, in {Path.cwd()}: {shlex.join(self._words())}") + "\n"

    def _words(self) -> list[str]:
        """Return the words of the command that a person gave: a launcher's, or this process' own."""
        for launcher in reversed(list(self.environment.launchers())):
            try:
                return launcher.cmdline()
            except psutil.Error:  # it is gone, or another person's
                continue
        return sys.orig_argv

    def take(self, text: str) -> None:
        """Keep whole lines."""
        lines = (visible(_CONTROL.sub("", line.rstrip("\r").rsplit("\r", 1)[-1])) for line in text.split("\n"))
        kept = "".join(f"{line}\n" for line in lines if line.strip()).encode("utf-8", "backslashreplace")
        with self._lock:
            if self._early is not None:
                self._early.append(kept)
            elif self._file is not None:
                self._write(kept)

    def _write(self, kept: bytes) -> None:
        assert self._file is not None
        try:
            while kept:
                kept = kept[os.write(self._file, kept) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        self._stderr.write(f"{CONSOLE} could not be written ({error.strerror}); the run goes on\n")


class _Kept:
    """A stream of text goes where it went, and each line of it to a console."""

    def __init__(self, stream: TextIO, console: Console) -> None:
        self._stream, self._console, self._begun = stream, console, ""

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        finally:
            whole, newline, begun = (self._begun + text).rpartition("\n")
            self._begun = begun.rsplit("\r", 1)[-1]
            if newline:
                self._console.take(whole)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
