"""The heap of a process keeps what is freed, for the next step to take."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3), whose values are ints.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_TOP_PAD_BYTES = 2**28


def can_keep_freed_memory() -> bool:
    """Tell whether `keep_freed_memory` does anything here: it leaves what a person has set for glibc's allocator in the
    environment, and other C libraries have no such call."""
    told = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    return not told and hasattr(ctypes.CDLL(None), "mallopt")


def keep_freed_memory() -> None:
    """Keep freed memory in this process, where that can be.

    glibc maps every large block afresh and gives it back when it is freed, and a training step makes and frees the same
    blocks again: each time the system fills every page of them with zeros. Threads would have heaps of their own, of
    64 MiB, and map what is larger, as gloo's do for each reduction, so that all threads share one heap.
    """
    if can_keep_freed_memory():
        for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _TOP_PAD_BYTES), (_ARENA_MAX, 1)):
            ctypes.CDLL(None).mallopt(name, value)
