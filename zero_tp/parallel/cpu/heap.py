"""How glibc's heap of a process that trains on CPUs keeps, joins and returns freed memory."""

from __future__ import annotations

import ctypes
import os
import sys

# Parameters of mallopt(3), whose values are ints.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_ARENA_MAX = -8
_TOP_PAD_BYTES = 2**28
_LARGE_BYTES = 2**25
"""A large block's size: the highest that _MMAP_THRESHOLD may be."""
_HUGE_PAGE_BYTES = 2**21
_MADV_HUGEPAGE = 14  # of madvise(2)
TUNABLES = "GLIBC_TUNABLES"
WITHOUT_CACHES = "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
"""The value of TUNABLES with which freed blocks are joined at once."""


class _Heap:
    """What this process does with freed memory.

    Attributes:
        returns: `return_freed_memory` has an effect.
        advised: end of the heap that is advised to have huge pages; 0: it is not to have them.
    """

    returns = False
    advised = 0


def can_keep_freed_memory() -> bool:
    """Return whether `keep_freed_memory` has an effect: with glibc, unless the environment sets
    its allocator.
    """
    # `mallopt` would override these settings of the user's own.
    tunables = os.environ.get(TUNABLES, "").replace(WITHOUT_CACHES, "")
    tuned = "glibc.malloc" in tunables or any(name.startswith("MALLOC_") for name in os.environ)
    return not tuned and hasattr(ctypes.CDLL(None), "mallopt")


def restart_without_caches() -> None:
    """Start this process anew with `WITHOUT_CACHES` if it is to train on CPUs.

    torch asks for blocks at multiples of 64 bytes. glibc cuts each from a larger one, and keeps the
    ends in its caches of small blocks. So a freed block lacks its ends, and no tensor of its size
    fits there again: ZeRO-2 took 3.7 GiB instead of 2.3 (benchmarks/tried.md). Only the
    environment turns these caches off, and only when a process begins.

    It does nothing where torch is imported already, because that takes seconds, where
    DS_ACCELERATOR is not "cpu", or for a script that was read from a pipe and is gone.
    """
    tunables = os.environ.get(TUNABLES, "")
    if (
        os.environ.get("DS_ACCELERATOR") == "cpu"
        and "torch" not in sys.modules
        and (sys.argv[0] == "-c" or os.path.isfile(sys.argv[0]))
        and WITHOUT_CACHES not in tunables
        and can_keep_freed_memory()
    ):
        joined = ":".join(filter(None, (tunables, WITHOUT_CACHES)))
        words = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, words, {**os.environ, TUNABLES: joined})


def keep_freed_memory(*, large: bool = True) -> None:
    """Keep freed memory in this process, if its allocator can.

    By default glibc maps each large block and unmaps it when it is freed. A training step allocates
    the same blocks again, and the kernel zeroes their pages each time. All threads share one heap:
    gloo's threads would have their own, of 64 MiB each, and still map each reduction's larger
    blocks: 51,600 fresh pages a step in one ZeRO-2 run (benchmarks/tried.md).

    Args:
        large: keep blocks of 32 MiB or more, too. Else such a block, where it fits nowhere, is
            mapped by itself: a heap that grows for each of them is a tenth larger.
    """
    if can_keep_freed_memory():
        for name, value in (
            (_MMAP_MAX, 0) if large else (_MMAP_THRESHOLD, _LARGE_BYTES),
            # The heap's free end is never returned.
            (_TRIM_THRESHOLD, -1),
            # It grows by 256 MiB at a time, instead of by a system call for each block.
            (_TOP_PAD, _TOP_PAD_BYTES),
            (_ARENA_MAX, 1),
        ):
            ctypes.CDLL(None).mallopt(name, value)
        _Heap.advised = _end()


def let_return_freed_memory() -> None:
    """Let `return_freed_memory` have its effect in this process, if its allocator can."""
    _Heap.returns = can_keep_freed_memory()


def returns_freed_memory() -> bool:
    """Return whether `return_freed_memory` has an effect."""
    return _Heap.returns


def return_freed_memory() -> None:
    """Return the pages of freed memory to the kernel, after `let_return_freed_memory`.

    It is called where memory is about to peak: what the heap has freed between tensors that live
    need not count then. Where freed memory is kept, a page that is touched again is a huge one if
    the kernel has them for those who ask: one fault for 512 pages.
    """
    if _Heap.returns:
        library = ctypes.CDLL(None)
        if _Heap.advised and (end := _end()) > _Heap.advised:
            start = -(-_Heap.advised // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            # Advice: a kernel without huge pages returns an error, which changes nothing.
            library.madvise(
                ctypes.c_void_p(start), ctypes.c_size_t(max(0, end - start)), _MADV_HUGEPAGE
            )
            _Heap.advised = end
        library.malloc_trim(ctypes.c_size_t(0))


def _end() -> int:
    """Return the address of the heap's end."""
    sbrk = ctypes.CDLL(None).sbrk
    sbrk.restype = ctypes.c_void_p
    return int(sbrk(ctypes.c_ssize_t(0)) or 0)
