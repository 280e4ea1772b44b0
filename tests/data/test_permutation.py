"""Permutations and random numbers: pure functions of a key, pinned because runs resume by them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import THOROUGH
from zero_tp.data import permutation
from zero_tp.data.permutation import Permutation, uniforms


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 200), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_permutation_is_one(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order.entries(np.arange(size)).tolist()) == list(range(size))


@given(st.integers(1, 10**13), st.integers(0, 2**64 - 1), st.data())
def test_many_entries_are_each_entry(size: int, key: int, data: st.DataObject) -> None:
    order = Permutation(size, key, 3)
    numbers = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    assert order.entries(np.array(numbers, np.int64)).tolist() == [
        order.entries(np.array([i]))[0] for i in numbers
    ]
    with pytest.raises(IndexError):
        order.entries(np.array([size]))


@THOROUGH
@pytest.mark.slow
def test_permutations_are_uniform_and_differ() -> None:
    size, trials = 10, 1000
    counts = np.zeros((size, size))
    for seed in range(trials):
        counts[np.arange(size), Permutation(size, seed, 0).entries(np.arange(size))] += 1
    # Each cell is binomial: mean 100, standard deviation 9.5.
    assert np.abs(counts - trials / size).max() < 5 * np.sqrt(trials / size)
    keys = [(1, 0), (1, 1), (2, 0), (1, 0, 1), (0, 1)]
    assert len({tuple(Permutation(50, *key).entries(np.arange(50)).tolist()) for key in keys}) == 5


def test_the_order_never_changes() -> None:
    pinned = [13, 9, 4, 19, 0, 16, 12, 14, 8, 6, 2, 15, 17, 1, 7, 18, 11, 3, 5, 10]
    assert Permutation(20, 1234, 0, 0).entries(np.arange(20)).tolist() == pinned


def test_random_numbers_are_splitmix64s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published outputs of state 1234567."""
    published = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431)
    with monkeypatch.context() as patch:
        patch.setattr(permutation, "_fold_key", lambda key: np.array([1234567], np.uint64))
        assert list(itertools.islice(uniforms(1), 4)) == [(x >> 11) / 2**53 for x in published]
    numbers, (state,) = (
        list(itertools.islice(uniforms(7, 8), 1000)),
        permutation._fold_key((7, 8)).tolist(),
    )
    states = [(state + i * 0x9E3779B97F4A7C15) % 2**64 for i in (1, 256, 257, 1000)]
    mixed = permutation._mix(np.array(states, np.uint64)).tolist()
    assert [numbers[i - 1] for i in (1, 256, 257, 1000)] == [(x >> 11) / 2**53 for x in mixed], (
        "over block edges"
    )
    assert (
        len({next(uniforms(*key)) for key in [(1,), (2,), (1, 0), (1, 1), (0, 1), (1, 0, 0)]}) == 6
    )
