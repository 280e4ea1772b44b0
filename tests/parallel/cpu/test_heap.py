"""Freed memory is kept for later tensors, unless the environment tunes malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tiers import THOROUGH, in_tiers
from zero_tp.parallel.cpu.heap import can_keep_freed_memory

FAULTS = """
import resource, sys, torch
from concurrent.futures import ThreadPoolExecutor
from zero_tp.parallel.cpu.heap import can_keep_freed_memory, keep_freed_memory
print(can_keep_freed_memory())
if sys.argv[1] == "keep":
    keep_freed_memory()
threads, make = ThreadPoolExecutor(1), lambda: torch.ones(2**24).add_(1).sum()
for turn in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (threads.submit(make).result if sys.argv[2] == "thread" else make)()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


KEPT: list[tuple[str, str, dict[str, str], bool, bool]] = [
    ("keep", "main", {}, True, True),
    ("keep", "thread", {}, True, True),
    ("leave", "main", {}, True, False),
    ("leave", "thread", {}, True, False),
    ("keep", "main", {"MALLOC_MMAP_THRESHOLD_": "131072"}, False, False),
    ("keep", "main", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False, False),
]


@THOROUGH
@pytest.mark.parametrize(("word", "where", "variables", "can", "kept"), in_tiers(KEPT, [KEPT[1]]))
def test_freed_memory_is_kept_unless_the_environment_tunes_malloc(
    word: str, where: str, variables: dict[str, str], can: bool, kept: bool
) -> None:
    """A tensor of 64 MiB, made and freed again and again, has 16,384 pages. In a thread it is
    larger than the heap.

    Small blocks may take an end of what was freed, and then the next tensor no longer fits there:
    up to five of the first tensors had fresh pages in twenty processes, none after them.
    """
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    words = [sys.executable, "-c", FAULTS, word, where]
    done = subprocess.run(words, env=bare | variables, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert (said == "True") == can
    assert (int(faults) < 1000) == kept


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_tuned_malloc_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not can_keep_freed_memory()
