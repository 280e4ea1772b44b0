"""The model of CUDA's caching allocator against traces worked out by hand; its sizes against torch's own headers."""

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

KIB, MIB = 2**10, 2**20


def test_sizes_are_torchs() -> None:
    headers = Path(torch.__file__).parent / "include/c10/core"
    text = (headers / "AllocatorConfig.h").read_text()
    found = dict(re.findall(r"constexpr size_t k(\w+) = (\d+);", text))
    ours = {
        "MinBlockSize": allocator.MIN_BLOCK,
        "SmallSize": allocator.SMALL,
        "SmallBuffer": allocator.SMALL_SEGMENT,
        "MinLargeAlloc": allocator.MIN_LARGE,
        "RoundLarge": allocator.ROUND_LARGE,
    }
    assert {name: int(found[name]) for name in ours} == ours
    assert re.findall(r"large_segment_size_\{(\d+)\}", text) == [str(allocator.LARGE_SEGMENT)]


def test_a_small_request_takes_its_part_of_a_segment() -> None:
    device = CachingAllocator()
    first, second = device.allocate(1), device.allocate(MIB)
    assert (first.address, first.size, second.address, second.size) == (0, 512, 512, MIB)
    assert (device.allocated, device.reserved) == (512 + MIB, 2 * MIB)
    third = device.allocate(MIB)  # of which 1 MiB - 512 bytes are left: the next segment
    assert third.address == 2 * MIB and device.reserved == 4 * MIB


@pytest.mark.parametrize(
    ("size", "reserved", "allocated"),
    [
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 10 * MIB + 512),  # 2 MiB - 512 are split off
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB is not
    ],
)
def test_a_large_request_gets_a_segment(size: int, reserved: int, allocated: int) -> None:
    device = CachingAllocator()
    device.allocate(size)
    assert (device.reserved, device.allocated) == (reserved, allocated)


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    device = CachingAllocator()
    wide, _, narrow, _ = (device.allocate(size * MIB) for size in (6, 2, 4, 2))
    device.free(wide)
    device.free(narrow)
    assert device.allocate(3 * MIB + 512).address == narrow.address and device.reserved == 20 * MIB


def test_neighbours_that_are_free_join() -> None:
    device = CachingAllocator()
    blocks = [device.allocate(5 * MIB) for _ in range(4)]
    for number in (0, 2, 1):  # the third joins both
        device.free(blocks[number])
    assert device.allocate(15 * MIB).address == 0 and device.reserved == 20 * MIB


def test_a_gap_that_no_request_fits_is_fragmentation() -> None:
    """Short-lived 6 MiB between long-lived 6 MiB: two free gaps of 6 MiB do not hold 15 MiB."""
    trace = [("a", 6 * MIB), ("b", 6 * MIB), ("c", 6 * MIB), ("d", 6 * MIB), ("a", 0), ("c", 0), ("e", 15 * MIB)]
    # The first segment of 20 MiB has a, b, c and 2 MiB left, the second d and 14, the third e.
    found = replay(trace)
    assert (found.tensors, found.reserved) == (27 * MIB, (20 + 20 + 16) * MIB)
    assert found.fragmentation == pytest.approx(29 / 56)


def test_free_segments_go_back_where_the_device_is_full() -> None:
    trace = [("a", 12 * MIB), ("a", 0), ("b", 14 * MIB)]
    assert replay(trace).reserved == 26 * MIB
    assert replay(trace, 14 * MIB).reserved == 14 * MIB == least_capacity(trace)
    with pytest.raises(OutOfMemory):
        replay(trace, 14 * MIB - 1)


def test_a_segment_of_which_a_part_is_used_stays() -> None:
    trace = [("a", 12 * MIB), ("b", 16 * MIB), ("b", 0), ("c", 4 * MIB), ("d", 16 * MIB)]
    assert replay(trace).reserved == 44 * MIB == least_capacity(trace)  # c lies in b's segment


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
        everything = sorted([*blocks, *free], key=lambda block: block.address)
        assert sum(block.size for block in everything) == device.reserved
        assert all(a.address + a.size == b.address for a, b in itertools.pairwise(everything))
        assert sum(block.size for block in blocks) == device.allocated
    for block in blocks:
        device.free(block)
    assert device.allocated == 0
    left = [entry[2] for pool in device._free.values() for entry in pool]
    assert all(block.before is None and block.after is None for block in left)
