"""A model of PyTorch's caching allocator on CUDA, to replay the allocations and frees of a step
(ZeRO-R's M_D).

The CPU's allocator has no segments. The rules are those of c10/cuda/CUDACachingAllocator.cpp with
default settings, for one stream; the sizes are those of c10/core/AllocatorConfig.h and
CachingDeviceAllocator.h of torch 2.13:

- a request is rounded up to 512 bytes; up to 1 MiB it goes to the small pool, else to the large
  one;
- it takes the smallest free block that is large enough, of equal ones that with the lowest address;
- if there is none, a segment is allocated: 2 MiB in the small pool, 20 MiB below 10 MiB, else a
  multiple of 2 MiB;
- the rest of a block is split off: from 512 bytes on in the small pool, above 1 MiB in the large
  one;
- a freed block is merged with its free neighbours in the segment, which stays with the process;
- if the device is full, all free segments are released, and the segment is requested once more.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_BLOCK = 512
SMALL = 1 << 20
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
ROUND_LARGE = 2 << 20


class OutOfMemory(Exception):
    """The device has no contiguous memory of the requested size."""


@dataclass(eq=False)
class Block:
    """A part of a segment; `before` and `after` are its neighbours there."""

    address: int
    size: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class CachingAllocator:
    """The caching allocator of a device.

    Attributes:
        capacity: bytes of the device; None: no limit.
        reserved: bytes of the process's segments.
        allocated: bytes of the blocks in use.
    """

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.reserved = self.allocated = 0
        self._end = 0
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes, which is more than 0.

        Raises:
            OutOfMemory: no free block is large enough, and the device has no room for a segment.
        """
        size = -(-size // MIN_BLOCK) * MIN_BLOCK
        small = size <= SMALL
        pool = self._free[small]
        place = bisect.bisect_left(pool, size, key=lambda entry: entry[0])
        block = pool.pop(place)[2] if place < len(pool) else self._segment(size, small)
        left = block.size - size
        if left >= MIN_BLOCK if small else left > SMALL:
            rest = Block(block.address + size, left, small, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.after = rest
            block.size = size
            self._put(rest)
        block.free = False
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Free a block."""
        assert not block.free, "freed twice"
        self.allocated -= block.size
        before = block.before
        after = block.after
        if before is not None and before.free:
            self._take(before)
            block.address = before.address
            block.size = block.size + before.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and after.free:
            self._take(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block
        self._put(block)

    def _segment(self, size: int, small: bool) -> Block:
        segment_size = (
            SMALL_SEGMENT
            if small
            else LARGE_SEGMENT
            if size < MIN_LARGE
            else -(-size // ROUND_LARGE) * ROUND_LARGE
        )
        if self.capacity is not None and self.reserved + segment_size > self.capacity:
            self._release_free_segments()
            if self.reserved + segment_size > self.capacity:
                raise OutOfMemory(
                    f"{segment_size} bytes, with {self.reserved} of {self.capacity} reserved"
                )
        self.reserved += segment_size
        self._end += segment_size
        return Block(self._end - segment_size, segment_size, small)

    def _release_free_segments(self) -> None:
        for small, pool in self._free.items():
            self._free[small] = [entry for entry in pool if entry[2].before or entry[2].after]
            self.reserved -= sum(entry[0] for entry in pool) - sum(
                entry[0] for entry in self._free[small]
            )

    def _put(self, block: Block) -> None:
        block.free = True
        # Addresses are unique, so blocks themselves are never compared.
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        del pool[bisect.bisect_left(pool, (block.size, block.address), key=lambda entry: entry[:2])]


Event = tuple[Hashable, int]
"""(tensor, its bytes when allocated, 0 when freed)."""


class Replay(NamedTuple):
    """The peaks of a replay: tensors and segments [bytes]."""

    tensors: int
    reserved: int

    @property
    def fragmentation(self) -> float:
        """Return the share of the segments' peak that tensors do not fill at theirs."""
        return 1 - self.tensors / self.reserved


def replay(events: Iterable[Event], capacity: int | None = None) -> Replay:
    """Replay allocations and frees in this order.

    Raises:
        OutOfMemory: `capacity` bytes are not enough.
    """
    allocator = CachingAllocator(capacity)
    blocks: dict[Hashable, tuple[Block, int]] = {}
    tensors = most = reserved = 0
    for name, size in events:
        if size:
            blocks[name] = allocator.allocate(size), size
            tensors += size
        elif name in blocks:
            block, gone = blocks.pop(name)
            allocator.free(block)
            tensors -= gone
        most = max(most, tensors)
        reserved = max(reserved, allocator.reserved)
    return Replay(most, reserved)


def least_capacity(events: Iterable[Event]) -> int:
    """Return the least device memory, in multiples of 2 MiB, in which the events run."""
    events = list(events)
    free = replay(events)
    low = free.tensors // ROUND_LARGE - 1
    high = -(-free.reserved // ROUND_LARGE)
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            replay(events, middle * ROUND_LARGE)
            high = middle
        except OutOfMemory:
            low = middle
    return high * ROUND_LARGE
