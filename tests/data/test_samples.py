"""The order of samples: the same for each split of a batch, each window once an epoch, blends by
largest deficit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.tiny_models import write_corpus
from tests.tiers import THOROUGH
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data import samples as samples_module
from zero_tp.data.permutation import Permutation
from zero_tp.data.samples import BLEND_PERIOD, PackedSamples, chain
from zero_tp.data.validation_samples import ValidationSamples

Corpus = Callable[..., str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Makes a corpus of the tokens first, first + 1, …: a token says where it stands."""

    def make(tokens: int, first: int = 0) -> str:
        documents = np.array_split(np.arange(first, first + tokens), 3)
        return str(write_corpus(tmp_path_factory.mktemp("corpus") / "c", documents, 1_000_000))

    return make


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    micro=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    data=st.integers(1, 4),
    step=st.integers(0, 50),
    seed=st.integers(0, 5),
)
def test_ranks_together_hold_the_global_batch(
    corpus: Corpus, micro: int, accumulation: int, data: int, step: int, seed: int
) -> None:
    prefixes = _two(corpus)
    samples = PackedSamples(prefixes, 4, seed)
    size = micro * accumulation * data
    whole = torch.from_numpy(np.stack([samples[k] for k in range(step * size, (step + 1) * size)]))
    assert whole.shape == (size, 5)
    assert whole.dtype == torch.int64
    ranks = [
        samples.batches_from(step * size, micro, accumulation, rank, data) for rank in range(data)
    ]
    assert all(
        part.shape == (micro, 4) for batches in ranks for batch in batches for part in batch[:2]
    )
    assert all(batch[2:] == (None, None) for batches in ranks for batch in batches)
    # Accumulation outermost, then ranks: read in that order the rows are the global batch itself.
    in_order = [ranks[rank][i] for i in range(accumulation) for rank in range(data)]
    assert torch.equal(torch.cat([batch.input_ids for batch in in_order]), whole[:, :-1])
    assert torch.equal(torch.cat([batch.labels for batch in in_order]), whole[:, 1:])


_MADE: dict[str, float] = {}


def _two(corpus: Corpus) -> dict[str, float]:
    if not _MADE:
        _MADE.update({corpus(103): 0.7, corpus(61, first=500): 0.3})
    return _MADE


def test_each_epoch_has_each_target_once(corpus: Corpus) -> None:
    samples = PackedSamples({corpus(103): 1.0}, 4, seed=7)
    windows = 25  # (103 - 1) // 4
    orders = []
    for epoch in range(3):
        starts = [int(samples[k][0]) for k in range(epoch * windows, (epoch + 1) * windows)]
        assert sorted(starts) == list(range(0, 100, 4))
        targets = [
            int(t) for k in range(epoch * windows, (epoch + 1) * windows) for t in samples[k][1:]
        ]
        assert sorted(targets) == list(range(1, 101))
        orders.append(starts)
    assert orders[0] != orders[1] != orders[2]


def test_a_sample_depends_on_its_number_alone(corpus: Corpus) -> None:
    """Read in another order by another object, and a trillion samples in: at once, with the
    shares kept.
    """
    prefixes = _two(corpus)
    first, second = PackedSamples(prefixes, 4, 3), PackedSamples(prefixes, 4, 3)
    expected = [first[k] for k in range(300)]
    assert all(np.array_equal(second[k], expected[k]) for k in reversed(range(300)))
    numbers = np.random.default_rng(0).integers(0, 10**6, 300)
    each = np.concatenate([second.locate(numbers[i : i + 1]) for i in range(len(numbers))], axis=1)
    assert np.array_equal(second.locate(numbers), each)
    far = 10**12
    corpora, epochs, _ = second.locate(np.arange(far, far + 100))
    assert Counter(corpora.tolist()) == {0: 70, 1: 30}
    assert epochs[0] == far * 7 // 10 // 25


@pytest.mark.slow
def test_blend_matches_largest_deficit_and_its_proportions(corpus: Corpus) -> None:
    weights = [0.5, 0.3, 0.2]
    samples = PackedSamples(
        {corpus(50, first=100 * i): 10 * w for i, w in enumerate(weights)}, 4, 1
    )
    counts = [0, 0, 0]
    for k in range(1000):
        corpus_number, epoch, _ = (int(part[0]) for part in samples.locate(np.array([k])))
        # Megatron's greedy choice, restated with its own rule.
        deficits = [w * (k + 1) - n for w, n in zip(weights, counts, strict=True)]
        assert deficits[corpus_number] >= max(deficits) - 1e-9
        assert epoch == counts[corpus_number] // 12
        counts[corpus_number] += 1
        assert all(abs(n - w * (k + 1)) <= 1 for n, w in zip(counts, weights, strict=True))
    assert counts == [500, 300, 200]


def test_blend_covers_epochs_across_periods(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples_module, "BLEND_PERIOD", 10)
    samples = PackedSamples({corpus(50): 1, corpus(30, first=100): 2}, 4, 1)
    corpora, epochs, places = samples.locate(np.arange(200))
    for number, windows in enumerate(samples.windows):
        for epoch in range(np.count_nonzero(corpora == number) // windows):
            part = np.flatnonzero(corpora == number)[epoch * windows : (epoch + 1) * windows]
            assert set(epochs[part].tolist()) == {epoch}
            assert set(places[part].tolist()) == set(range(windows))


@pytest.mark.slow
@settings(deadline=None, max_examples=10)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5))
def test_shares_follow_the_weights(weights: list[float]) -> None:
    assume(min(weights) / sum(weights) > 1 / BLEND_PERIOD)  # smaller shares are refused
    blend = samples_module._Blend({str(i): weight for i, weight in enumerate(weights)})
    chosen, _ = blend.locate(np.arange(BLEND_PERIOD, 2 * BLEND_PERIOD))
    for i, weight in enumerate(weights):
        assert (
            abs(np.count_nonzero(chosen == i) / BLEND_PERIOD - weight / sum(weights))
            <= 1 / BLEND_PERIOD
        )


def test_refusals_have_numbers(corpus: Corpus) -> None:
    short = corpus(4)
    PackedSamples({corpus(5): 1.0}, 4, 0)
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: PackedSamples({short: 1.0}, 4, 0),
            r"its 3 documents of 4 tokens are too short for a sample",
        ),
        (lambda: PackedSamples({corpus(50): 1, corpus(51): 0}, 4, 0), "weight 0 of"),
        (
            lambda: PackedSamples({corpus(50): 1e6, corpus(51): 1}, 4, 0),
            r"at least 0\.0001 is needed",
        ),
        (lambda: ValidationSamples(corpus(1), 8), "3 documents of 1 tokens are too short"),
        (lambda: PackedSamples({}, 4, 0), "no corpus"),
    ]
    for make, message in cases:
        with pytest.raises(UserError, match=message):
            make()
    assert len(ValidationSamples(corpus(2), 8)) == 1


@settings(deadline=None, max_examples=20)
@given(limit=st.integers(1, 40), micro=st.integers(1, 5), data=st.integers(1, 4))
def test_a_limited_validation_does_not_depend_on_the_topology(
    corpus: Corpus, limit: int, micro: int, data: int
) -> None:
    samples = ValidationSamples(_two(corpus), 8)

    def scored(micro: int, data: int) -> list[int]:
        ranks = [list(samples.batches(limit, micro, rank, data)) for rank in range(data)]
        assert {len(batches) for batches in ranks} == {-(-min(limit, 21) // (micro * data))}
        return sorted(
            int(x) for batches in ranks for b in batches for x in b.labels[b.labels != IGNORE_INDEX]
        )

    assert scored(micro, data) == scored(1, 1)
    firsts = {int(row[0]) for batch in samples.batches(limit, 1, 0, 1) for row in batch.labels}
    assert len(firsts) == min(limit, 21)


@THOROUGH
@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.sampled_from([3, 4]), min_size=2, max_size=5),
    ends=st.lists(st.integers(1, 60), min_size=5, max_size=5),
    orders=st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_later_sequences_go_on_in_each_corpus(
    corpus: Corpus, lengths: list[int], ends: list[int], orders: list[bool]
) -> None:
    """Windows of one length are read as if there were one sequence; a new length begins an
    epoch.
    """
    names = [corpus(50), corpus(31, first=100)]
    sequences = [
        PackedSamples({name: 1.0 for name in (names[::-1] if turned else names)}, length, 5)
        for length, turned in zip(lengths, orders, strict=False)
    ]
    chain(sequences, ends[: len(sequences)])
    # The corpora are numbered as the first sequence has them.
    first = [one.prefix for one in sequences[0].corpora]
    read: dict[str, tuple[int, int]] = {}
    for samples, length, end in zip(sequences, lengths, ends, strict=False):
        corpora, epochs, windows = samples.locate(np.arange(end))
        for index, one in enumerate(samples.corpora):
            before, count = read.get(one.prefix, (length, 0))
            if before != length:
                old = (one.tokens - 1) // before
                count = -(-count // old) * samples.windows[index]
            own = corpora == index
            for epoch, window in zip(epochs[own], windows[own], strict=True):
                assert epoch == count // samples.windows[index]
                order = Permutation(samples.windows[index], 5, int(epoch), first.index(one.prefix))
                position = np.array([count % samples.windows[index]])
                assert order.entries(position)[0] == window
                count += 1
            read[one.prefix] = (length, count)
