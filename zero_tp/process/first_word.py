"""Exactly one of all ranks of a node says why a run ends: whoever gets the first word.

The ranks share two small files in the temporary directory, named after the launch: a lock, and a mark that the word
has been said. They exist only once something went wrong, before any process group too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LOCK_WAIT_SECONDS = 4.0
START_SPREAD_SECONDS = 5.0
KEPT_SECONDS = 24 * 3600.0


class FirstWord:
    """A job has one first word on this node, and its ranks share the right to it.

    Args:
        job: names this launch on this machine; equal on all its ranks.
        since: when this rank started (Unix seconds). A mark set more than 5 s before that is an earlier launch's,
            possible only where one shell starts ranks by hand: a launcher is a new process each time.
    """

    def __init__(self, job: str, since: float, directory: Path | None = None) -> None:
        self.directory = directory or Path(tempfile.gettempdir()) / f"zero_tp-{os.getuid()}"
        self.mark = self.directory / f"{job}.said"
        self.lock = self.directory / f"{job}.lock"
        self.since = since

    def said(self) -> bool:
        """Tell whether a rank of this job has said why it ends."""
        try:
            return self.mark.stat().st_mtime >= self.since - START_SPREAD_SECONDS
        except OSError:  # there is no mark
            return False

    def say(self, text: str) -> bool:
        """Write `text` (may be empty) to stderr unless another rank has spoken; True when it was us.

        Returns once the word is written, by whichever rank; waits at most 4 s for a rank that is writing.
        """
        try:
            with self._locked() as ours:
                if not ours or self.said():
                    return False
                write_stderr(text)
                self.mark.touch()
                return True
        except OSError:
            # No usable temporary directory. Said by several ranks is better than not said.
            write_stderr(text)
            return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        self.directory.mkdir(mode=0o700, exist_ok=True)
        if self.directory.stat().st_uid != os.getuid():
            raise PermissionError(f"{self.directory} belongs to someone else")
        self._forget_old()
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + LOCK_WAIT_SECONDS
            held = False
            while not held and time.monotonic() < deadline:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it if its holder dies
                    held = True
                except BlockingIOError:
                    time.sleep(0.02)
            yield held
        finally:
            os.close(descriptor)

    def _forget_old(self) -> None:
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another rank tidies up too
                if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                    path.unlink()


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
