"""Permutations and random numbers as pure functions of a key.

They do not depend on any library's version, because runs resume by them: `tests/data` pins values.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

_MASK_64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8
# Halves have at least 3 bits: with fewer, a Feistel network reaches only some of the orders of a
# tiny corpus.
_SMALLEST_HALF = 3
_BLOCK = 256  # random numbers that are computed at once


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Mix 64 bits with the finalizer of SplitMix64.

    x has any shape of at least one dimension, because NumPy warns if a scalar wraps.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _fold_key(key: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Return the state of a key, uint64 [1]."""
    state = np.zeros(1, np.uint64)
    for part in key:
        # One part after another, so (1, 2) and (2, 1) are different keys. The mask takes negative
        # parts as their two's complement.
        state = _mix((state ^ np.uint64(part & _MASK_64)) + _GOLDEN)
    return state


def uniforms(*key: int) -> Iterator[float]:
    """Yield random numbers of [0, 1) without end, a pure function of `key`.

    They are the upper 53 bits of SplitMix64's outputs.
    """
    state = _fold_key(key)
    steps = np.arange(1, _BLOCK + 1, dtype=np.uint64) * _GOLDEN
    while True:
        # SplitMix64 adds the golden ratio's 64 bits for each number and mixes the sum. So a block
        # of numbers is computed at once.
        x = state + steps
        state = x[-1:]
        # 53 bits are the precision of a double, so no number is rounded up to 1.
        yield from ((_mix(x) >> np.uint64(11)) * 2.0**-53).tolist()


class Permutation:
    """A permutation of 0 … size-1 as a pure function of `key`: each entry in O(1) time and memory.

    A Feistel network of 8 rounds permutes the next larger power of 4; outputs beyond `size` are put
    through it again (cycle walking; from size 17 on, fewer than 4 passes on average).

    Size 10 is permuted in a domain of 64 numbers, two halves of 3 bits. With the key 1:

        entry 6     6 → 5                       is 5
        entry 2     2 → 51 → 30 → 53 → 6        is 6: the numbers from 10 on go through again

    Two entries never end at the same number, because the network has an inverse.
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size > 0
        self.size = size
        # Both halves have equally many bits, so the domain is a power of 4.
        self._half = max(_SMALLEST_HALF, ((size - 1).bit_length() + 1) // 2)
        self._keys = _mix(_fold_key(key) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)

    def entries(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the entries at these indices, int64 [indices].

        Raises:
            IndexError: one is outside 0 … size-1.
        """
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.size):
            raise IndexError(
                f"entries {numbers.min()} to {numbers.max()} of a permutation of {self.size}"
            )
        half = np.uint64(self._half)
        mask = np.uint64((1 << self._half) - 1)
        entries = numbers.astype(np.uint64)
        walking = np.arange(entries.size)
        # All entries at once; only those that are still outside take another pass.
        while walking.size:
            left = entries[walking] >> half
            right = entries[walking] & mask
            for key in self._keys:
                # A round is invertible whatever `_mix` does: `right` is kept, and gives the mask
                # that takes the XOR back.
                left, right = right, left ^ (_mix(right ^ key) & mask)
            entries[walking] = left << half | right
            walking = walking[entries[walking] >= self.size]
        return entries.astype(np.int64)
