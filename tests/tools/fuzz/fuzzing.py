"""What the fuzzers make their bases with."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def scratch() -> Path:
    """Make a directory that is there until this process ends, whatever its forks do at their ends."""
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
