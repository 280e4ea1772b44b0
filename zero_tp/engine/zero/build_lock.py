"""Report waits for the lock of a build in torch's folder of extensions, which a killed build
leaves behind.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

import psutil
from torch.utils.file_baton import FileBaton

from zero_tp.base.errors import show

LOCK_SECONDS = 30.0

_wait_in_silence = FileBaton.wait


def _to_stderr(line: str) -> None:
    show(line, file=sys.stderr)


def report_build_locks(
    after: float = LOCK_SECONDS, write: Callable[[str], object] = _to_stderr
) -> None:
    """Let one rank of each machine report a lock that it has waited for `after` seconds.

    DeepSpeed's ops and a user's own extensions are built under such a lock. torch 2.13 waits for it
    without end or message. From 2.14 on the operating system releases the lock with its process, so
    a killed build leaves none.

    Args:
        write: called with the line.
    """

    def wait(baton: FileBaton) -> None:
        timer = threading.Timer(after, lambda: write(_describe(baton.lock_file_path)))
        # A rank that ends meanwhile must not wait for the timer.
        timer.daemon = True
        # The ranks of a node wait for one file; one line says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            timer.start()
        try:
            _wait_in_silence(baton)
        finally:
            timer.cancel()

    FileBaton.wait = wait  # type: ignore[assignment]


def _describe(lock: str) -> str:
    builder = _builder(lock)
    if builder is not None:
        reason = f"process {builder} is building there; if it hangs, end it and remove the lock"
    else:
        reason = (
            "no process of this machine is building there: it is left from a build that was "
            "killed; unless another "
            "machine builds in this folder, stop this start, remove the lock and start again"
        )
    return f"waiting for {lock}: {reason}"


def _builder(lock: str) -> int | None:
    """Return the process that holds the lock: it keeps the file open until the build ends."""
    for process in psutil.process_iter():
        try:
            if any(file.path == lock for file in process.open_files()):
                return process.pid
        except psutil.Error:  # it has ended, or belongs to somebody else
            continue
    return None
