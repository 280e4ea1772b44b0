"""A shuffled order needs no memory here: entry i of a permutation is computed from its size and key alone.

Random numbers of a sample are such a pure function of a key too. Neither can change with a library's version.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
# Halves of at least 3 bits: with fewer, a Feistel network reaches only some of the orders of a tiny corpus.
_SMALLEST_HALF = 3
_BLOCK = 256  # random numbers that are made at once


def _mix(x: int) -> int:
    """Mix 64 bits well: the finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


def _mix_all(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `_mix` of each; uint64 wraps as the mask there does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _folded(key: tuple[int, ...]) -> int:
    state = 0
    for part in key:
        state = _mix((state ^ (part & _WORD)) + _GOLDEN & _WORD)
    return state


def uniforms(*key: int) -> Iterator[float]:
    """Yield random numbers of [0, 1) without end, a pure function of `key` (SplitMix64, its upper 53 bits)."""
    state, steps = np.uint64(_folded(key)), np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    while True:
        x = state + steps
        state = x[-1]
        yield from ((_mix_all(x) >> np.uint64(11)) * 2.0**-53).tolist()


class Permutation:
    """A permutation orders 0 … size-1 as a pure function of `key`: `permutation[i]` in O(1) time and memory.

    A Feistel network of 8 rounds permutes the next larger power of 4; outputs beyond `size` are put through it again
    (cycle walking, fewer than 4 rounds of it on average for 17 and more). Unlike a stored shuffle of numpy's it costs
    no memory for a corpus of any size, resumes anywhere, and can't change with a library's version.
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size > 0
        self.size = size
        self._half = max(_SMALLEST_HALF, ((size - 1).bit_length() + 1) // 2)
        state = _folded(key)
        self._keys = [_mix(state + round_ * _GOLDEN & _WORD) for round_ in range(1, _ROUNDS + 1)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        if not 0 <= i < self.size:
            raise IndexError(f"entry {i} of a permutation of {self.size}")
        half, mask = self._half, (1 << self._half) - 1
        while True:
            left, right = i >> half, i & mask
            for key in self._keys:
                left, right = right, left ^ (_mix(right ^ key) & mask)
            i = left << half | right
            if i < self.size:
                return i

    def entries(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the entries of many numbers at once, int64 as they are. IndexError: one lies outside."""
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.size):
            raise IndexError(f"entries {numbers.min()} to {numbers.max()} of a permutation of {self.size}")
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        found = numbers.astype(np.uint64)
        walking = np.arange(found.size)
        while walking.size:
            left, right = found[walking] >> half, found[walking] & mask
            for key in self._keys:
                left, right = right, left ^ (_mix_all(right ^ np.uint64(key)) & mask)
            found[walking] = left << half | right
            walking = walking[found[walking] >= self.size]
        return found.astype(np.int64)
