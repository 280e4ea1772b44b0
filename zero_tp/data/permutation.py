"""Shuffled orders and random numbers as pure functions of a key, which no library's version can change.

An order needs no memory: entry i of a permutation is computed from its size and key alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
# Halves have at least 3 bits: with fewer, a Feistel network reaches only some of the orders of a tiny corpus.
_SMALLEST_HALF = 3
_BLOCK = 256  # random numbers that are computed at once


def _mix(x: int) -> int:
    """Mix 64 bits: the finalizer of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
    return x ^ (x >> 31)


def _mix_all(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `_mix` of each; uint64 wraps as the mask there does."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fold_key(key: tuple[int, ...]) -> int:
    state = 0
    for part in key:
        state = _mix((state ^ (part & _WORD)) + _GOLDEN & _WORD)
    return state


def uniforms(*key: int) -> Iterator[float]:
    """Yield random numbers of [0, 1) without end, a pure function of `key` (SplitMix64, its upper 53 bits)."""
    state, steps = np.uint64(_fold_key(key)), np.arange(1, _BLOCK + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
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
        state = _fold_key(key)
        self._keys = [_mix(state + round_ * _GOLDEN & _WORD) for round_ in range(1, _ROUNDS + 1)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        return int(self.entries(np.array([i]))[0])

    def entries(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the entries at many indices at once, int64 as they are. IndexError: one is outside 0 … size-1."""
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.size):
            raise IndexError(f"entries {numbers.min()} to {numbers.max()} of a permutation of {self.size}")
        half, mask = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        entries = numbers.astype(np.uint64)
        walking = np.arange(entries.size)
        while walking.size:
            left, right = entries[walking] >> half, entries[walking] & mask
            for key in self._keys:
                left, right = right, left ^ (_mix_all(right ^ np.uint64(key)) & mask)
            entries[walking] = left << half | right
            walking = walking[entries[walking] >= self.size]
        return entries.astype(np.int64)
