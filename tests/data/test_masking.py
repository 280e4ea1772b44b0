"""N-grams of whole words and the masks in their place, against transformers' collators."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorForLanguageModeling

from tests.support.tokenizers import BARE, SPEECHES
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.data.masked import Masking, ngrams
from zero_tp.data.masking_vocabulary import MaskingVocabulary
from zero_tp.data.permutation import uniforms
from zero_tp.tools.corpus.tokenizer_training import train_wordpiece


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_ngrams_fit(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=40))
    follows = data.draw(
        st.lists(st.booleans(), min_size=max(0, len(sizes) - 1), max_size=max(0, len(sizes) - 1))
    )
    budget, most = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5))
    drawn = list(ngrams(sizes, follows, budget, most, uniforms(data.draw(st.integers(0, 2**63)))))
    words = [word for first, n in drawn for word in range(first, first + n)]
    left = budget - sum(sizes[word] for word in words)
    assert len(words) == len(set(words)) and left >= 0
    assert all(1 <= n <= most and all(follows[first : first + n - 1]) for first, n in drawn)
    assert not [word for word, size in enumerate(sizes) if word not in words and size <= left], (
        "it goes on while one fits"
    )


def test_lengths_of_ngrams_are_as_one_over_n_and_places_alike(seed: int) -> None:
    words, lengths, places = 2000, Counter[int](), Counter[int]()
    for row in range(400):
        for first, n in itertools.islice(
            ngrams([1] * words, [True] * words, words, 3, uniforms(seed, row)), 25
        ):
            lengths[n] += 1
            places[first * 8 // (words - n + 1)] += 1
    total = sum(lengths.values())
    for n, expected in {1: 6 / 11, 2: 3 / 11, 3: 2 / 11}.items():
        assert abs(lengths[n] / total - expected) < 5 * np.sqrt(
            expected * (1 - expected) / total
        ), lengths
    assert all(
        abs(places[part] / total - 1 / 8) < 5 * np.sqrt(7 / 64 / total) for part in range(8)
    ), places


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Random token replacement is not supported with whole word masking"
)
def test_masks_are_those_of_transformers_collators(seed: int) -> None:
    """Where a word is what stands between spaces, and n-grams are single words, its collator of
    whole words masks alike: no word in part, and long words as often as short ones. What takes
    their place is in its collator of tokens, as that of words has no random ones.
    """
    tokenizer = train_wordpiece(lambda: iter(SPEECHES), 1500, cased=False)
    vocabulary = MaskingVocabulary.from_tokenizer(tokenizer, Path("tokenizer"), len(tokenizer))
    encodings = [
        tokenizer(
            " ".join(words[at : at + 130]),
            return_offsets_mapping=True,
            truncation=True,
            max_length=256,
        )
        for words in map(str.split, BARE)
        for at in range(0, len(words), 130)
    ]
    masking = Masking(vocabulary, 0.15, 1)
    whole, single = (
        DataCollatorForLanguageModeling(
            tokenizer, whole_word_mask=words, mlm_probability=0.15, seed=seed
        )
        for words in (True, False)
    )
    theirs, ours, tokens = Tally(vocabulary), Tally(vocabulary), Tally(vocabulary)
    for number, encoding in enumerate(encodings):
        row = np.array(encoding.input_ids)
        for repeat in range(3):
            inputs, labels = masking(row, uniforms(seed, number, repeat))
            ours.add_words(row, inputs, labels)
            ours.add_kinds(row, inputs, labels)
            batch = whole(
                [{key: encoding[key] for key in ("input_ids", "offset_mapping", "attention_mask")}]
            )
            theirs.add_words(row, batch["input_ids"][0].numpy(), batch["labels"][0].numpy())
            batch = single([{"input_ids": encoding["input_ids"]}])
            tokens.add_kinds(row, batch["input_ids"][0].numpy(), batch["labels"][0].numpy())
    for pieces in (1, 2, 3):
        rate, spread = ours.rate(pieces)
        other, spread_other = theirs.rate(pieces)
        # A word of 3 tokens does not fit into the last 2 of a row's budget of 30 or more.
        assert abs(rate - other) < 5 * np.hypot(spread, spread_other) + 0.05 * 0.15, (
            pieces,
            rate,
            other,
        )
    for tally in (ours, tokens):
        total = sum(tally.kinds.values())
        for kind, expected in {"mask": 0.8, "other": 0.1, "same": 0.1}.items():
            assert (
                abs(tally.kinds[kind] / total - expected)
                < 5 * np.sqrt(expected * (1 - expected) / total) + 0.001
            )


class Tally:
    """Counts of masked words and of what stands in their place."""

    def __init__(self, vocabulary: MaskingVocabulary):
        self.vocabulary, self.words, self.masked = vocabulary, Counter[int](), Counter[int]()
        self.kinds = Counter[str]()

    def add_words(self, row: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> None:
        chosen = labels != IGNORE_INDEX
        assert np.array_equal(labels[chosen], row[chosen]) and np.array_equal(
            inputs[~chosen], row[~chosen]
        )
        assert not self.vocabulary.special[row[chosen]].any()
        begins = np.flatnonzero(self.vocabulary.word_begins(row))
        for begin, end in itertools.pairwise([*begins.tolist(), len(row) - 1]):
            assert len(set(chosen[begin:end].tolist())) == 1, "a word is masked whole or not at all"
            self.words[end - begin] += 1
            self.masked[end - begin] += int(chosen[begin])

    def add_kinds(self, row: np.ndarray, inputs: np.ndarray, labels: np.ndarray) -> None:
        chosen = labels != IGNORE_INDEX
        for now, was in zip(inputs[chosen], row[chosen], strict=True):
            self.kinds[
                "mask" if now == self.vocabulary.mask else "same" if now == was else "other"
            ] += 1

    def rate(self, pieces: int) -> tuple[float, float]:
        """The share of words of so many tokens that is masked, and its standard deviation."""
        words = self.words[pieces]
        return self.masked[pieces] / words, np.sqrt(0.15 * 0.85 / words)
