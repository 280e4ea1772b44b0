"""Samples of the masked objective.

A sample is two segments of a document, in order or swapped, with whole words masked.

A row is `[CLS] A [SEP] B [SEP]`, padded to the sequence length s. A and B are consecutive segments
of a document, s - 3 tokens together; B begins with a sentence. Half of the samples have them
swapped; the sentence head learns their order (arXiv 1909.08053 section 5.3, 1909.11942 section
3.1). Without that head a row is one segment, `[CLS] A [SEP]`, and s - 3 below is s - 2.

Windows of a document begin every s - 3 tokens, and each is one sample of an epoch; the last one is
padded. In a corpus with sentences (sequences of its index) a window begins with the sentence of its
first token, and for two segments also ends with a sentence. Tokens beyond s - 3 are trimmed from
the longer segment, one at a time from either end, as in BERT and Megatron-LM: a cut at the end of
the later segment would reveal the order.

Whole words are masked in n-grams of consecutive words of one segment, as in BERT and Megatron-LM.
The tokenizer's marks define a word: WordPiece's `##` continues one; byte-level BPE's `Ġ` (and white
space) or SentencePiece's `▁` begins one.

A row of s = 10 before masking, in order. Swapped, the segment of the text's end comes first:

    input_ids         [CLS] a0 a1 a2 [SEP] b0 b1 b2 [SEP] [PAD]
    token_type_ids      0    0  0  0   0    1  1  1   1     0
    attention_mask      1    1  1  1   1    1  1  1   1     0
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data.batch import MaskedBatch
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.masking_vocabulary import MaskingVocabulary
from zero_tp.data.permutation import uniforms
from zero_tp.data.samples import TrainingSamples
from zero_tp.data.validation_samples import FixedSamples

MASKED = 0.8
RANDOM = 0.1
"""Shares of the selected tokens that become the mask token and a random one; the others stay."""
# Most tries hit while a row is mostly free. Listing all places for each n-gram would take longer.
_TRIES = 16  # random places to try for an n-gram; then all free places are listed
_TRAINING, _VALIDATION = 1, 2  # in the key of random numbers, so that both draw different ones
_DOCUMENTS = 1024  # documents whose windows are counted at once


@dataclass(frozen=True)
class Masking:
    """Selects tokens of a row and masks them.

    Attributes:
        probability: share of a row's ordinary tokens to select, rounded, at least 1 token. A word
            of more tokens than that is never selected.
        max_ngram: words of the longest n-gram; n words are drawn with probability ∝ 1/n.
    """

    vocabulary: MaskingVocabulary
    probability: float
    max_ngram: int

    def __call__(
        self, row: npt.NDArray[np.int64], randoms: Iterator[float]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the masked row [s], and its labels [s]: the token that was masked, or -100.

        The words of a row of two segments:

            row        [CLS] play ##ing cat [SEP] dog [SEP]
            begins           1          3         5             where words begin
            sizes            2          1         1             in tokens
            follows          True       False                   no n-gram joins cat and dog
        """
        vocabulary = self.vocabulary
        maskable = ~vocabulary.special[row]
        begins = np.flatnonzero(vocabulary.word_begins(row))
        # A word ends where the next one or a special token begins.
        stops = np.append(begins[1:], len(row))
        sizes = np.add.reduceat(maskable, begins, dtype=np.int64) if len(begins) else begins
        budget = max(1, round(self.probability * int(maskable.sum())))
        follows = (begins + sizes == stops)[:-1]
        inputs = row.copy()
        labels = np.full_like(row, IGNORE_INDEX)
        for word, n in ngrams(sizes.tolist(), follows.tolist(), budget, self.max_ngram, randoms):
            # Each token is replaced by itself, as in BERT: a word may become one mask and one
            # random token.
            for place in range(begins[word], begins[word + n - 1] + sizes[word + n - 1]):
                labels[place] = row[place]
                kind = next(randoms)
                if kind < MASKED:
                    inputs[place] = vocabulary.mask
                elif kind < MASKED + RANDOM:
                    inputs[place] = self._random(randoms)
        return inputs, labels

    def _random(self, randoms: Iterator[float]) -> int:
        # Drawn again instead of from a list of ordinary tokens: few are special.
        while self.vocabulary.special[token := int(next(randoms) * len(self.vocabulary.special))]:
            pass
        return token


def ngrams(
    sizes: list[int], follows: list[bool], budget: int, max_ngram: int, randoms: Iterator[float]
) -> Iterator[tuple[int, int]]:
    """Yield disjoint n-grams as (first word, n).

    They end when `budget` tokens are selected or no other word fits.

    n is drawn first, with probability ∝ 1/n, and then one of its free places, all with the same
    probability. If none is left for n words within the budget, n - 1 words are tried; this happens
    only for the last few of a row.

    Args:
        sizes: tokens of each word.
        follows: for each word but the last, whether the next one follows without a special token in
            between.
    """
    cumulative_weights = list(accumulate(1 / n for n in range(1, max_ngram + 1)))
    # Tokens before each word: the size of an n-gram is a difference.
    before = [0, *accumulate(sizes)]
    free = [True] * len(sizes)
    count = len(sizes)

    def fits(word: int, n: int) -> bool:
        return (
            word + n <= count
            and before[word + n] - before[word] <= budget
            and all(free[word : word + n])
            and all(follows[word : word + n - 1])
        )

    while budget > 0:
        longest = bisect(cumulative_weights, next(randoms) * cumulative_weights[-1]) + 1
        # A word has at least one token, so more words than the budget never fit.
        for n in range(min(longest, budget), 0, -1):
            # Rejection: of the places that fit, each is hit with the same probability.
            candidates = (int(next(randoms) * count) for _ in range(_TRIES))
            word = next((word for word in candidates if fits(word, n)), None)
            if word is None and (places := [word for word in range(count) if fits(word, n)]):
                word = places[int(next(randoms) * len(places))]
            if word is not None:
                break
        else:
            return
        free[word : word + n] = [False] * n
        budget -= before[word + n] - before[word]
        yield word, n


def trim(
    parts: Sequence[npt.NDArray[np.int64]], limit: int, randoms: Iterator[float]
) -> list[npt.NDArray[np.int64]]:
    """Trim parts of a row to `limit` tokens in all.

    The longest part loses one token at a time, at either end. Of 5 and 2 tokens and a limit of 5,
    the first part loses two; of 5 and 4 tokens and a limit of 6, it loses two and the other one.
    """
    spans = [[0, len(part)] for part in parts]
    for _ in range(sum(map(len, parts)) - limit):
        span = max(spans, key=lambda span: span[1] - span[0])
        if next(randoms) < 0.5:
            span[0] += 1
        else:
            span[1] -= 1
    return [part[slice(*span)] for part, span in zip(parts, spans, strict=True)]


class DocumentWindows:
    """The windows of a corpus' documents, numbered in order.

    Memory: 8 bytes per block of 1,024 documents; `locate` counts the windows inside a block again.
    With a length of 40 and a shortest window of 3 tokens:

        document of 100 tokens    3 windows, from the tokens 0, 40 and 80
        document of 82 tokens     2 windows; the last 2 tokens are too few for a third

    Args:
        length: tokens of a window; windows of a document begin at this stride.
        shortest: tokens of the shortest window at the end of a document.
    """

    def __init__(self, corpus: IndexedCorpus, length: int, shortest: int) -> None:
        self.corpus = corpus
        self.length = length
        self.shortest = shortest
        # Counts of single documents are not kept: a billion of them would take 8 GB.
        counts = [int(self._counts(first).sum()) for first in range(0, len(corpus), _DOCUMENTS)]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def _counts(self, first: int) -> npt.NDArray[np.int64]:
        """Return the number of windows of each document from `first` on.

        int64 [at most _DOCUMENTS].
        """
        sizes = np.diff(self.corpus.document_starts(first, first + _DOCUMENTS + 1))
        return (sizes + (self.length - self.shortest)) // self.length

    def __len__(self) -> int:
        return int(self._before[-1])

    def locate(self, w: int) -> tuple[int, int]:
        """Return the document of window w, and the number of w in it."""
        block = int(np.searchsorted(self._before, w, side="right")) - 1
        counts = self._counts(block * _DOCUMENTS)
        ends = np.cumsum(counts)
        rest = w - int(self._before[block])
        i = int(np.searchsorted(ends, rest, side="right"))
        return block * _DOCUMENTS + i, rest - int(ends[i] - counts[i])


@dataclass(frozen=True)
class MaskedRowBuilder:
    """Makes rows of the masked objective from windows.

    Attributes:
        sequence_length: s.
        sentence_order: two segments, in order or swapped; else one.
    """

    sequence_length: int
    masking: Masking
    sentence_order: bool

    def __post_init__(self) -> None:
        """Check the length. UserError: the special tokens leave too little room for segments."""
        if self.sequence_length < 2 * self.special_count:
            raise UserError(
                f"zero_tp.data.sequence_length: {self.sequence_length} tokens, of which the masked "
                "objective's special "
                f"ones are {self.special_count}; use at least {2 * self.special_count}"
            )

    @property
    def special_count(self) -> int:
        """Return the number of special tokens of a row."""
        return 3 if self.sentence_order else 2

    def windows(self, corpus: IndexedCorpus) -> DocumentWindows:
        """Return the windows of a corpus.

        The shortest has room for the eos token and one token for each segment.
        """
        return DocumentWindows(
            corpus, self.sequence_length - self.special_count, self.special_count
        )

    def row(
        self, windows: DocumentWindows, w: int, randoms: Iterator[float]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return window w as a row of a `MaskedBatch`, by name.

        `randoms` yields its random numbers.
        """
        tokens, begins = self._window(windows, w)
        if not self.sentence_order:
            return self._assemble([tokens], False, randoms)
        # No sentence begins inside the window: cut at a word.
        if not len(begins):
            begins = np.flatnonzero(self.masking.vocabulary.word_begins(tokens)[1:]) + 1
        # Not even a word begins inside: cut at any token.
        cuts = begins if len(begins) else np.arange(1, len(tokens))
        cut = int(cuts[int(next(randoms) * len(cuts))])
        # Trimmed before they are swapped, so that the order has no influence on which ends are
        # lost.
        parts = trim(
            [tokens[:cut], tokens[cut:]], self.sequence_length - self.special_count, randoms
        )
        return self._assemble(parts, next(randoms) < 0.5, randoms)

    def empty(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return a row that is not scored.

        It has padding after a [CLS], because softmax needs one visible token.
        """
        return self._assemble([], IGNORE_INDEX, iter(()))

    def _assemble(
        self, parts: list[npt.NDArray[np.int64]], swapped: int, randoms: Iterator[float]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return a masked row of segments.

        The parts are in the order of the text; `swapped` is the row's `next_sentence_label`.
        """
        vocabulary = self.masking.vocabulary
        s = self.sequence_length
        row = np.full(s, vocabulary.padding, np.int64)
        types = np.zeros(s, np.int64)
        used = 1
        row[0] = vocabulary.classifier
        for kind, part in enumerate(reversed(parts) if swapped else parts):
            end = used + len(part)
            # The separator belongs to the segment before it, as in BERT.
            row[used:end], row[end], types[used : end + 1] = part, vocabulary.separator, kind
            used = end + 1
        labels = np.full(s, IGNORE_INDEX, np.int64)
        if parts:
            row[:used], labels[:used] = self.masking(row[:used], randoms)
        mask = (np.arange(s) < used).astype(np.int64)
        batch = {
            "input_ids": row,
            "token_type_ids": types,
            "attention_mask": mask,
            "labels": labels,
        }
        return batch | (
            {"next_sentence_label": np.array(swapped, np.int64)} if self.sentence_order else {}
        )

    def _window(
        self, windows: DocumentWindows, w: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens of window w, and where its sentences begin.

        The eos token and the start of the first sentence are left out. Windows of 8 tokens, two
        segments, a document whose sentences a, b, c, d, e begin at the tokens 0, 5, 10, 12 and 15:

            window 1    begins at 8, inside b: moved back to 5, at most half a window
                        ends at 5 + 8, inside d: moved on to 15, where e begins
            returned    b0 … b4 c0 c1 d0 d1 d2, and [5, 7]; `row` trims the 10 tokens to 8
        """
        corpus = windows.corpus
        length = windows.length
        document, j = windows.locate(w)
        first, size = corpus.extent(document)
        start = j * length
        if start:
            # At most half a window earlier: else every window of a long sentence would begin where
            # the sentence does.
            lowest = start - length // 2
            starts = corpus.sequence_starts(first + lowest, start - lowest + 1)
            start = lowest + int(starts[-1]) if len(starts) else start
        stop = min(start + length, size)
        # From the second token on: the first sentence has nothing before it to be cut from.
        begins = corpus.sequence_starts(first + start + 1, stop - start - 1) + 1
        if self.sentence_order and len(begins):
            after = corpus.sequence_starts(first + stop, min(length, size - stop))
            if len(after) or stop + length >= size:
                stop = stop + int(after[0]) if len(after) else size
            # it ends inside a long sentence; starts of sentences would reveal the order, so `row`
            # cuts at a word
            else:
                begins = begins[:0]
        tokens = corpus.read(first + start, stop - start)
        # In the text's last segment only, the eos would tell the order.
        if stop == size and tokens[-1] == self.masking.vocabulary.eos:
            tokens = tokens[:-1]
        return tokens, begins[begins < len(tokens)]


def _batch(rows: Sequence[dict[str, npt.NDArray[np.int64]]]) -> MaskedBatch:
    return MaskedBatch(
        {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
    )


class MaskedSamples(TrainingSamples[MaskedBatch]):
    """Training samples of the masked objective, one infinite sequence: see `TrainingSamples`.

    The start of the second segment, the segments' order and the masks are drawn from (seed, number
    of the sample).
    """

    def __init__(
        self, prefixes: Mapping[str, float], row_builder: MaskedRowBuilder, seed: int
    ) -> None:
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        self.row_builder = row_builder
        self._windows = [row_builder.windows(corpus) for corpus in corpora]
        counts = [len(windows) for windows in self._windows]
        super().__init__(prefixes, corpora, counts, row_builder.sequence_length, seed)

    def identity(self, corpus: IndexedCorpus, *, hash_tokens: bool = True) -> dict[str, Any]:
        """Return `IndexedCorpus.identity` with `vocabulary`, the masking vocabulary's hash."""
        vocabulary = self.row_builder.masking.vocabulary
        return super().identity(corpus, hash_tokens=hash_tokens) | {
            "vocabulary": vocabulary.sha256()
        }

    def __getitem__(self, k: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return sample k as a row of a batch, int64 [s] each and `next_sentence_label` []."""
        # Every number is drawn from (seed, k), so a sample does not depend on which rank reads it,
        # or on the samples before it.
        corpus, _, window = (int(part[0]) for part in self.locate(np.array([k])))
        return self.row_builder.row(
            self._windows[corpus], window, uniforms(self.seed, _TRAINING, self.first_number + k)
        )

    def _batch(self, numbers: range) -> MaskedBatch:
        return _batch([self[k] for k in numbers])


class MaskedValidation(FixedSamples[MaskedBatch]):
    """Validation samples of the masked objective.

    They are all windows of held-out corpora, with the same masks each time.
    """

    def __init__(self, prefixes: Collection[str], row_builder: MaskedRowBuilder) -> None:
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        self.row_builder = row_builder
        self._windows = [row_builder.windows(corpus) for corpus in corpora]
        super().__init__(prefixes, corpora, [len(windows) for windows in self._windows])

    def _batch(self, numbers: list[int], rows: int) -> MaskedBatch:
        # One object many times: `_batch` copies the rows when it stacks them.
        batch = [self.row_builder.empty()] * rows
        for i, n in enumerate(numbers):
            corpus, w = self._locate(n)
            batch[i] = self.row_builder.row(self._windows[corpus], w, uniforms(_VALIDATION, n))
        return _batch(batch)
