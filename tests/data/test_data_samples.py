"""The sample order: every factoring of a global batch sees the same samples, each pass sees each window once."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zero_tp.constants import IGNORE_INDEX
from zero_tp.data import samples as samples_module
from zero_tp.data.indexed import IndexedWriter
from zero_tp.data.permutation import Permutation
from zero_tp.data.samples import BLEND_PERIOD, PackedSamples, ValidationSamples
from zero_tp.errors import UserError

Corpus = Callable[..., str]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Makes a corpus of the tokens first, first + 1, …: a token says where it stands."""

    def make(tokens: int, first: int = 0) -> str:
        prefix = tmp_path_factory.mktemp("corpus") / "c"
        with IndexedWriter(prefix, 1_000_000) as writer:
            for piece in np.array_split(np.arange(first, first + tokens), 3):
                writer.add_document(piece)
        return str(prefix)

    return make


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 200), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_permutation_is_one(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed, epoch)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_permutations_are_uniform_and_differ() -> None:
    size, trials = 10, 1000
    counts = np.zeros((size, size))
    for seed in range(trials):
        order = Permutation(size, seed, 0)
        for i in range(size):
            counts[i, order[i]] += 1
    # Each cell is binomial: mean 100, standard deviation 9.5.
    assert np.abs(counts - trials / size).max() < 5 * np.sqrt(trials / size)
    orders = {tuple(Permutation(50, *key)[i] for i in range(50)) for key in [(1, 0), (1, 1), (2, 0), (1, 0, 1), (0, 1)]}
    assert len(orders) == 5


def test_the_order_never_changes() -> None:
    """Runs resume by it, so these values are part of the promise."""
    order = Permutation(20, 1234, 0, 0)
    pinned = [13, 9, 4, 19, 0, 16, 12, 14, 8, 6, 2, 15, 17, 1, 7, 18, 11, 3, 5, 10]
    assert [order[i] for i in range(20)] == pinned


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
    ranks = [samples.rank_batches(step, size, micro, accumulation, rank, data) for rank in range(data)]
    assert all(part.shape == (micro, 4) for batches in ranks for batch in batches for part in batch[:2])
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
        targets = [int(t) for k in range(epoch * windows, (epoch + 1) * windows) for t in samples[k][1:]]
        assert sorted(targets) == list(range(1, 101))
        orders.append(starts)
    assert orders[0] != orders[1] != orders[2]


def test_resuming_equals_going_straight_through(corpus: Corpus) -> None:
    prefixes = _two(corpus)
    straight = PackedSamples(prefixes, 4, 3)
    seen = [straight[k] for k in range(300)]
    resumed = PackedSamples(prefixes, 4, 3)
    for k in range(150, 300):
        assert np.array_equal(resumed[k], seen[k])
    # A trillion samples in: at once, with the shares kept.
    far = 10**12
    corpora, epochs, _ = resumed.sources(np.arange(far, far + 100))
    assert Counter(corpora.tolist()) == {0: 70, 1: 30}
    assert epochs[0] == far * 7 // 10 // 25


def test_blend_matches_largest_deficit_and_its_proportions(corpus: Corpus) -> None:
    weights = [0.5, 0.3, 0.2]
    samples = PackedSamples({corpus(50, first=100 * i): 10 * w for i, w in enumerate(weights)}, 4, 1)
    taken = [0, 0, 0]
    for k in range(1000):
        corpus_number, epoch, _ = (int(part[0]) for part in samples.sources(np.array([k])))
        # Megatron's greedy choice, restated with its own rule.
        deficits = [w * (k + 1) - n for w, n in zip(weights, taken, strict=True)]
        assert deficits[corpus_number] >= max(deficits) - 1e-9
        assert epoch == taken[corpus_number] // 12
        taken[corpus_number] += 1
        assert all(abs(n - w * (k + 1)) <= 1 for n, w in zip(taken, weights, strict=True))
    assert taken == [500, 300, 200]


def test_blend_covers_epochs_across_periods(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "BLEND_PERIOD", 10)
    samples = PackedSamples({corpus(50): 1, corpus(30, first=100): 2}, 4, 1)
    corpora, epochs, places = samples.sources(np.arange(200))
    for number, windows in enumerate(samples.windows):
        for epoch in range(np.count_nonzero(corpora == number) // windows):
            part = np.flatnonzero(corpora == number)[epoch * windows : (epoch + 1) * windows]
            assert set(epochs[part].tolist()) == {epoch}
            assert set(places[part].tolist()) == set(range(windows))


@settings(deadline=None, max_examples=10)
@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=5))
def test_shares_follow_the_weights(weights: list[float]) -> None:
    assume(min(weights) / sum(weights) > 1 / BLEND_PERIOD)  # smaller shares are refused
    blend = samples_module._Blend({str(i): weight for i, weight in enumerate(weights)})
    chosen, _ = blend.locate(np.arange(BLEND_PERIOD, 2 * BLEND_PERIOD))
    for i, weight in enumerate(weights):
        assert abs(np.count_nonzero(chosen == i) / BLEND_PERIOD - weight / sum(weights)) <= 1 / BLEND_PERIOD


def test_errors_have_numbers(corpus: Corpus) -> None:
    short = corpus(4)
    with pytest.raises(UserError, match=r"holds 4 tokens; one sample of data.sequence_length 4 needs 5"):
        PackedSamples({short: 1.0}, 4, 0)
    PackedSamples({corpus(5): 1.0}, 4, 0)
    with pytest.raises(UserError, match="weight 0 of"):
        PackedSamples({corpus(50): 1, corpus(51): 0}, 4, 0)
    with pytest.raises(UserError, match=r"at least 0\.0001 is needed"):
        PackedSamples({corpus(50): 1e6, corpus(51): 1}, 4, 0)
    with pytest.raises(ValueError, match="micro-batch 2 × accumulation 1 × data 2 ≠ global batch 5"):
        PackedSamples({corpus(50): 1}, 4, 0).rank_batches(0, 5, 2, 1, 0, 2)


@settings(deadline=None, max_examples=20)
@given(micro=st.integers(1, 5), data=st.integers(1, 4))
def test_validation_scores_every_token_once(corpus: Corpus, micro: int, data: int) -> None:
    first, second = _two(corpus)
    samples = ValidationSamples([first, second], 8)
    assert len(samples) == 13 + 8
    ranks = [list(samples.batches(None, micro, rank, data)) for rank in range(data)]
    assert len({len(batches) for batches in ranks}) == 1
    labels, inputs = [], []
    for batches in ranks:
        for batch in batches:
            assert batch.input_ids.shape == batch.labels.shape == (micro, 8)
            scored = batch.labels != IGNORE_INDEX
            labels += batch.labels[scored].tolist()
            inputs += batch.input_ids[scored].tolist()
    assert sorted(labels) == [*range(1, 103), *range(501, 561)]
    assert [token + 1 for token in inputs] == labels


@settings(deadline=None, max_examples=20)
@given(limit=st.integers(1, 40), micro=st.integers(1, 5), data=st.integers(1, 4))
def test_a_limited_validation_does_not_depend_on_the_topology(
    corpus: Corpus, limit: int, micro: int, data: int
) -> None:
    samples = ValidationSamples(_two(corpus), 8)

    def scored(micro: int, data: int) -> list[int]:
        ranks = [list(samples.batches(limit, micro, rank, data)) for rank in range(data)]
        assert {len(batches) for batches in ranks} == {-(-min(limit, 21) // (micro * data))}
        return sorted(int(x) for batches in ranks for b in batches for x in b.labels[b.labels != IGNORE_INDEX])

    assert scored(micro, data) == scored(1, 1)
    firsts = {int(row[0]) for batch in samples.batches(limit, 1, 0, 1) for row in batch.labels}
    assert len(firsts) == min(limit, 21)


def test_validation_errors(corpus: Corpus) -> None:
    with pytest.raises(UserError, match="validation needs at least 2"):
        ValidationSamples(corpus(1), 8)
    assert len(ValidationSamples(corpus(2), 8)) == 1
