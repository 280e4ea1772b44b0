"""Keep freed memory in this process's heap, so that the next step reuses it."""

from __future__ import annotations

import ctypes
import os

# Parameters of mallopt(3), whose values are ints.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_ARENA_MAX = -8
_TOP_PAD_BYTES = 2**28


def can_keep_freed_memory() -> bool:
    """Return whether `keep_freed_memory` has an effect: with glibc, unless the environment sets
    its allocator.
    """
    # `mallopt` would override these settings of the user's own.
    tuned = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    tuned = tuned or any(name.startswith("MALLOC_") for name in os.environ)
    return not tuned and hasattr(ctypes.CDLL(None), "mallopt")


def keep_freed_memory() -> None:
    """Keep freed memory in this process, if its allocator can.

    By default glibc maps each large block and unmaps it when it is freed. A training step allocates
    the same blocks again, and the kernel zeroes their pages each time. All threads share one heap:
    gloo's threads would have their own, of 64 MiB each, and still map each reduction's larger
    blocks: 51,600 fresh pages a step in one ZeRO-2 run (benchmarks/tried.md).
    """
    if can_keep_freed_memory():
        for name, value in (
            # No block is mapped by itself, and the heap's free end is never returned.
            (_MMAP_MAX, 0),
            (_TRIM_THRESHOLD, -1),
            # It grows by 256 MiB at a time, instead of by a system call for each block.
            (_TOP_PAD, _TOP_PAD_BYTES),
            (_ARENA_MAX, 1),
        ):
            ctypes.CDLL(None).mallopt(name, value)
