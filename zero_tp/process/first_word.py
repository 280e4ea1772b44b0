"""Exactly one of all ranks of a node says why a run ends: whoever gets the first word.

The ranks share two empty files in the temporary directory, named after the launch: a lock, and a mark that the word
has been said. They exist only once something went wrong, before any process group too. Others can write beside that
directory, so no link is followed, and what is tidied up is what only this module makes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
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
        name = re.sub(r"[^\w.-]", "_", job)[:200]
        self.mark, self.lock = f"{name}.said", f"{name}.lock"
        self.since = since

    def said(self) -> bool:
        """Tell whether a rank of this job has said why it ends."""
        try:
            with self._opened() as folder:
                marked = os.stat(self.mark, dir_fd=folder, follow_symlinks=False)
                return marked.st_mtime >= self.since - START_SPREAD_SECONDS
        except OSError:  # there is no mark
            return False

    def say(self, text: str) -> bool:
        """Write `text` (may be empty) to stderr unless another rank has spoken; True when it was us.

        Returns once the word is written, by whichever rank; waits at most 4 s for a rank that is writing.
        """
        try:
            self.directory.mkdir(mode=0o700, exist_ok=True)
            with self._opened() as folder, self._locked(folder) as ours:
                if not ours or self.said():
                    return False
                write_stderr(text)
                os.close(_create(self.mark, folder))
                os.utime(self.mark, dir_fd=folder, follow_symlinks=False)
                return True
        except OSError:
            # No usable temporary directory. Said by several ranks is better than not said.
            write_stderr(text)
            return True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != os.getuid():
                raise PermissionError(f"{self.directory} belongs to someone else")
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _locked(self, folder: int) -> Iterator[bool]:
        _forget_old(folder)
        descriptor = _create(self.lock, folder)
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


def _create(name: str, folder: int) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=folder)


def _forget_old(folder: int) -> None:
    """Delete marks and locks of a day ago: empty files of this person with their names."""
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # another rank tidies up too
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            own = name.endswith((".said", ".lock")) and stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
            if own and found.st_size == 0 and found.st_mtime < time.time() - KEPT_SECONDS:
                os.unlink(name, dir_fd=folder)


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
