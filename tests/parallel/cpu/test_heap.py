"""Freed memory is kept, joined and returned, unless the environment tunes malloc."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tiers import THOROUGH, in_tiers
from zero_tp.parallel.cpu.heap import TUNABLES, WITHOUT_CACHES, can_keep_freed_memory

FAULTS = """
import resource, sys, torch
from concurrent.futures import ThreadPoolExecutor
from zero_tp.parallel.cpu.heap import can_keep_freed_memory, keep_freed_memory
print(can_keep_freed_memory())
if sys.argv[1] != "leave":
    keep_freed_memory(large=sys.argv[1] == "keep")
elements = 2**18 * int(sys.argv[3])
threads, make = ThreadPoolExecutor(1), lambda: torch.ones(elements).add_(1).sum()
for turn in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    (threads.submit(make).result if sys.argv[2] == "thread" else make)()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


KEPT: list[tuple[str, str, int, dict[str, str], bool, bool]] = [
    ("keep", "main", 64, {}, True, True),
    ("keep", "thread", 64, {}, True, True),
    ("keep-small", "main", 16, {}, True, True),
    ("keep-small", "thread", 64, {}, True, False),
    ("leave", "main", 64, {}, True, False),
    ("leave", "thread", 64, {}, True, False),
    ("keep", "main", 64, {"MALLOC_MMAP_THRESHOLD_": "131072"}, False, False),
    ("keep", "main", 64, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, False, False),
]


@THOROUGH
@pytest.mark.parametrize(
    ("word", "where", "size", "variables", "can", "kept"), in_tiers(KEPT, [KEPT[1]])
)
def test_freed_memory_is_kept_unless_the_environment_tunes_malloc(
    word: str, where: str, size: int, variables: dict[str, str], can: bool, kept: bool
) -> None:
    """A tensor of 64 MiB, made and freed again and again, has 16,384 pages. In a thread it is
    larger than the heap. One of 16 MiB has 4,096, and is small.

    Small blocks may take an end of what was freed, and then the next tensor no longer fits there:
    up to five of the first tensors had fresh pages in twenty processes, none after them.
    """
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    words = [sys.executable, "-c", FAULTS, word, where, str(size)]
    done = subprocess.run(words, env=bare | variables, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert (said == "True") == can
    assert (int(faults) < 1000) == kept


def run(script: str, *words: str, stdin: str | None = None, **variables: str) -> list[str]:
    """Run a script in an environment that tunes no allocator, and return what it printed."""
    bare = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    done = subprocess.run(
        [sys.executable, *(() if stdin else ("-c", script)), *words],
        input=stdin,
        env=bare | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


RESTART = """
import os, sys
if "--torch" in sys.argv:
    import torch
from zero_tp.parallel.cpu.heap import can_keep_freed_memory, restart_without_caches
print("began", flush=True)
restart_without_caches()
print(os.environ.get("GLIBC_TUNABLES"), can_keep_freed_memory(), *sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "variables", "printed"),
    [
        (["a b"], {}, ["began", "began", f"{WITHOUT_CACHES} True a b"]),
        (
            [],
            {TUNABLES: "glibc.rtld.nns=4"},
            ["began"] * 2 + [f"glibc.rtld.nns=4:{WITHOUT_CACHES} True"],
        ),
        (["--torch"], {}, ["began", "None True --torch"]),
        ([], {"DS_ACCELERATOR": "cuda"}, ["began", "None True"]),
        ([], {TUNABLES: "glibc.malloc.arena_max=2"}, ["began", "glibc.malloc.arena_max=2 False"]),
        ([], {TUNABLES: WITHOUT_CACHES}, ["began", f"{WITHOUT_CACHES} True"]),
    ],
)
def test_a_process_that_trains_on_cpus_begins_once_more_without_caches(
    words: list[str], variables: dict[str, str], printed: list[str]
) -> None:
    assert run(RESTART, *words, **{"DS_ACCELERATOR": "cpu"} | variables) == printed


def test_a_script_that_was_read_from_a_pipe_goes_on() -> None:
    """Read once more it would be empty, and end well without having trained."""
    [began, went_on] = run("", "-", stdin=RESTART, DS_ACCELERATOR="cpu")
    assert (began, went_on) == ("began", "None True")


GROWTH = """
import torch
from zero_tp.parallel.cpu.heap import keep_freed_memory
keep_freed_memory()
torch.manual_seed(1)
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
layers = [
    part
    for _ in range(8)
    for part in (torch.nn.Linear(512, 1536), torch.nn.SiLU(), torch.nn.Linear(1536, 512))
]
model, rows = torch.nn.Sequential(*layers), torch.randn(1024, 512)
for step in range(6):
    model(rows).square().mean().backward()
    if step == 0:
        first = resident()
    model.zero_grad()
print(resident() - first)
"""


def test_a_step_s_tensors_fit_where_those_of_the_step_before_were() -> None:
    """MiB that the same step takes more when it runs again: 12 without glibc's caches of small
    blocks, 52 to 59 with them (glibc 2.36).
    """
    [without] = run(GROWTH, **{TUNABLES: WITHOUT_CACHES})
    [with_caches] = run(GROWTH)
    assert 2 * float(without) < float(with_caches)


RETURNED = """
import sys, torch
from zero_tp.parallel.cpu import heap
heap.keep_freed_memory()
if "let" in sys.argv:
    heap.let_return_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
for _ in range(3):
    tensors = [torch.ones(2**24), torch.ones(2**20)]  # 64 MiB, and one behind it that stays
    before = resident()
    del tensors[0]
    heap.return_freed_memory()
    print(round(before - resident()))
"""


def test_freed_memory_is_returned_where_a_run_lets_it() -> None:
    """Also where it was kept, and lies before memory that is used."""
    assert all(int(mib) >= 60 for mib in run(RETURNED, "let"))
    assert run(RETURNED) == ["0"] * 3


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_a_tuned_malloc_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not can_keep_freed_memory()
