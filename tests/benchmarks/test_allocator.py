"""The model of CUDA's caching allocator against traces worked out by hand; its sizes against
torch's own headers.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.papers import allocator
from benchmarks.papers.allocator import CachingAllocator, OutOfMemory, least_capacity, replay

MIB = 2**20


def test_sizes_are_torchs() -> None:
    headers = Path(torch.__file__).parent / "include/c10/core"
    text = (headers / "AllocatorConfig.h").read_text()
    constants = dict(re.findall(r"constexpr size_t k(\w+) = (\d+);", text))
    ours = {
        "MinBlockSize": allocator.MIN_BLOCK,
        "SmallSize": allocator.SMALL,
        "SmallBuffer": allocator.SMALL_SEGMENT,
        "MinLargeAlloc": allocator.MIN_LARGE,
        "RoundLarge": allocator.ROUND_LARGE,
    }
    assert {name: int(constants[name]) for name in ours} == ours
    assert re.findall(r"large_segment_size_\{(\d+)\}", text) == [str(allocator.LARGE_SEGMENT)]


def events(trace: str) -> list[tuple[str, int]]:
    """Return the events of a trace such as `a12 b3+512 -a`: allocations [MiB + bytes], and
    frees.
    """
    result = []
    for word in trace.split():
        mebibytes, _, more = word[1:].partition("+")
        result.append(
            (word[1], 0)
            if word.startswith("-")
            else (word[0], int(mebibytes) * MIB + int(more or 0))
        )
    return result


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # 2 MiB - 512 are split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is not
    ],
)
def test_a_request_gets_a_segment(size: int, reserved: int, allocated: int) -> None:
    device = CachingAllocator()
    device.allocate(size)
    assert (device.reserved, device.allocated) == (reserved, allocated)


@pytest.mark.parametrize(
    ("trace", "reserved"),
    [
        ("a0+1 b1", 2),  # small requests share a segment
        ("a0+1 b1 c1", 4),  # of which 1 MiB - 512 bytes are left
        ("a6 b2 c4 d2 -a -c e3+512 f6", 20),  # e takes the smallest free block that fits, c's
        ("a5 b5 c5 d5 -a -c -b e15", 20),  # free neighbours join
        ("a12 -a b14", 26),
        ("a12 b16 -b c4 d16", 44),  # c lies in b's segment
    ],
)
def test_traces_worked_out_by_hand(trace: str, reserved: int) -> None:
    assert replay(events(trace)).reserved == reserved * MIB


def test_a_gap_that_no_request_fits_is_fragmentation() -> None:
    """Two free gaps of 6 MiB do not hold 15 MiB."""
    # The first segment of 20 MiB has a, b, c and 2 MiB left, the second d and 14, the third e.
    replayed = replay(events("a6 b6 c6 d6 -a -c e15"))
    assert (replayed.tensors, replayed.reserved) == (27 * MIB, (20 + 20 + 16) * MIB)
    assert replayed.fragmentation == pytest.approx(29 / 56)


def test_free_segments_go_back_if_the_device_is_full() -> None:
    trace = events("a12 -a b14")
    assert replay(trace, 14 * MIB).reserved == 14 * MIB == least_capacity(trace)
    with pytest.raises(OutOfMemory):
        replay(trace, 14 * MIB - 1)
    assert least_capacity(events("a12 b16 -b c4 d16")) == 44 * MIB, (
        "a segment of which a part is used stays"
    )


sizes = st.integers(1, 30 * MIB) | st.integers(1, 3 * MIB)


@given(st.lists(st.tuples(sizes, st.integers(0, 20)), min_size=1, max_size=60))
def test_blocks_never_overlap_and_fill_their_segments(requests: list[tuple[int, int]]) -> None:
    device = CachingAllocator()
    blocks: list[allocator.Block] = []
    for size, freed in requests:
        blocks.append(device.allocate(size))
        if freed < len(blocks):
            device.free(blocks.pop(freed))
        free = [entry[2] for pool in device._free.values() for entry in pool]
        together = sorted([*blocks, *free], key=lambda block: block.address)
        assert sum(block.size for block in together) == device.reserved
        assert all(a.address + a.size == b.address for a, b in itertools.pairwise(together))
        assert sum(block.size for block in blocks) == device.allocated
    for block in blocks:
        device.free(block)
    assert device.allocated == 0
    left = [entry[2] for pool in device._free.values() for entry in pool]
    assert all(block.before is None and block.after is None for block in left)
