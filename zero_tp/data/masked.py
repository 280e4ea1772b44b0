"""Samples of the masked objective: two segments of a document, in order or swapped, with whole words masked.

A row is `[CLS] A [SEP] B [SEP]`, padded to the sequence length s. A and B together are s - 3 tokens of one document and
meet where a sentence begins. Half of the samples have them swapped; the sentence head learns their order (arXiv
1909.08053 section 5.3, 1909.11942 section 3.1). Without that head a row is one segment: `[CLS] A [SEP]`.

Windows of a document begin every s - 3 tokens, and each is one sample of a pass; the last one is padded. In a corpus
with sentences (sequences of its index) a window begins with the sentence that its first token belongs to. For two
segments it ends with a sentence, too. What exceeds s - 3 tokens is trimmed from the longer segment, a token at a time
from either end, as BERT and Megatron-LM do: a cut that shows the later segment would tell the order without reading.
So a pass has nearly every token nearly once.

Whole words are masked in n-grams, as BERT and Megatron-LM do. The tokenizer's own marks define a word: WordPiece's `##`
continues one; byte-level BPE's `Ġ` (and other white space) and SentencePiece's `▁` begin one. An n-gram is n
consecutive words of one segment.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zero_tp.constants import IGNORE_INDEX
from zero_tp.data.batch import MaskedBatch
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.permutation import uniforms
from zero_tp.data.samples import FixedSamples, TrainingSamples
from zero_tp.data.tokenizer import MaskingVocabulary
from zero_tp.errors import UserError

MASKED, RANDOM = 0.8, 0.1
"""Shares of the chosen tokens that become the mask token and a random one; the rest stays."""
_TRIES = 16  # random places for an n-gram before all free ones are listed
_TRAINING, _VALIDATION = 1, 2  # keys of random numbers
_DOCUMENTS = 1024  # whose windows are counted at once


@dataclass(frozen=True)
class Masking:
    """Choose tokens of a row and replace them.

    Attributes:
        probability: share of a row's tokens that is chosen, special ones not counted: at least one token, and never
            more than the share rounded.
        max_ngram: words of the longest n-gram; n of them are drawn with probability ∝ 1/n.
    """

    vocabulary: MaskingVocabulary
    probability: float
    max_ngram: int

    def __call__(
        self, row: npt.NDArray[np.int64], draw: Iterator[float]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the row [s] with masks in it, and its labels [s]: the token that was there, or -100.

        Args:
            draw: random numbers of [0, 1).
        """
        vocabulary = self.vocabulary
        maskable = ~vocabulary.special[row]
        begins = np.flatnonzero(vocabulary.word_begins(row))
        # A word ends where the next one or a special token begins.
        stops = np.append(begins[1:], len(row))
        sizes = np.add.reduceat(maskable, begins, dtype=np.int64) if len(begins) else begins
        budget = max(1, round(self.probability * int(maskable.sum())))
        follows = (begins + sizes == stops)[:-1]
        inputs, labels = row.copy(), np.full_like(row, IGNORE_INDEX)
        for word, n in ngrams(sizes.tolist(), follows.tolist(), budget, self.max_ngram, draw):
            for place in range(begins[word], begins[word + n - 1] + sizes[word + n - 1]):
                labels[place] = row[place]
                kind = next(draw)
                if kind < MASKED:
                    inputs[place] = vocabulary.mask
                elif kind < MASKED + RANDOM:
                    inputs[place] = self._random(draw)
        return inputs, labels

    def _random(self, draw: Iterator[float]) -> int:
        while self.vocabulary.special[token := int(next(draw) * len(self.vocabulary.special))]:
            pass
        return token


def ngrams(
    sizes: list[int], follows: list[bool], budget: int, max_ngram: int, draw: Iterator[float]
) -> Iterator[tuple[int, int]]:
    """Yield n-grams that share no word, as (first word, n), until `budget` tokens are chosen or none more fits.

    n is drawn first, with probability ∝ 1/n, and then one of the places that are left for it, each as likely. Where no
    place is left for n words within the budget, n - 1 are tried. So only the last few of a row are shorter than drawn.

    Args:
        sizes: tokens of each word.
        follows: whether the next word follows each word but the last, without a special token between.
    """
    lengths = list(accumulate(1 / n for n in range(1, max_ngram + 1)))
    before, free, count = [0, *accumulate(sizes)], [True] * len(sizes), len(sizes)

    def fits(word: int, n: int) -> bool:
        return (
            word + n <= count
            and before[word + n] - before[word] <= budget
            and all(free[word : word + n])
            and all(follows[word : word + n - 1])
        )

    while budget > 0:
        drawn = bisect(lengths, next(draw) * lengths[-1]) + 1
        for n in range(min(drawn, budget), 0, -1):
            tried = (int(next(draw) * count) for _ in range(_TRIES))
            word = next((word for word in tried if fits(word, n)), None)
            if word is None and (places := [word for word in range(count) if fits(word, n)]):
                word = places[int(next(draw) * len(places))]
            if word is not None:
                break
        else:
            return
        free[word : word + n] = [False] * n
        budget -= before[word + n] - before[word]
        yield word, n


def trimmed(parts: Sequence[npt.NDArray[np.int64]], most: int, draw: Iterator[float]) -> list[npt.NDArray[np.int64]]:
    """Return parts of a row that have `most` tokens together: the longest loses one at a time, from either end."""
    spans = [[0, len(part)] for part in parts]
    for _ in range(sum(map(len, parts)) - most):
        span = max(spans, key=lambda span: span[1] - span[0])
        if next(draw) < 0.5:
            span[0] += 1
        else:
            span[1] -= 1
    return [part[slice(*span)] for part, span in zip(parts, spans, strict=True)]


class DocumentWindows:
    """The windows of a corpus' documents, numbered in order.

    Memory: 8 bytes for 1,024 documents; `locate` counts the windows of as many.

    Args:
        length: tokens from the beginning of one window of a document to that of the next.
        shortest: a document's rest of fewer tokens is no window.
    """

    def __init__(self, corpus: IndexedCorpus, length: int, shortest: int) -> None:
        self.corpus, self.length, self.shortest = corpus, length, shortest
        counts = [int(self._counts(first).sum()) for first in range(0, len(corpus), _DOCUMENTS)]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def _counts(self, first: int) -> npt.NDArray[np.int64]:
        """Return the windows of each of the documents from `first` on, int64 [at most _DOCUMENTS]."""
        sizes = np.diff(self.corpus.first_tokens(first, first + _DOCUMENTS + 1))
        return (sizes + (self.length - self.shortest)) // self.length

    def __len__(self) -> int:
        return int(self._before[-1])

    def locate(self, w: int) -> tuple[int, int]:
        """Return the document of window w, and the number of w in it."""
        block = int(np.searchsorted(self._before, w, side="right")) - 1
        counts = self._counts(block * _DOCUMENTS)
        ends, rest = np.cumsum(counts), w - int(self._before[block])
        i = int(np.searchsorted(ends, rest, side="right"))
        return block * _DOCUMENTS + i, rest - int(ends[i] - counts[i])


@dataclass(frozen=True)
class SegmentPairs:
    """Makes rows of the masked objective from windows.

    Attributes:
        sequence_length: s.
        sentence_order: two segments, in order or swapped; else one.
    """

    sequence_length: int
    masking: Masking
    sentence_order: bool

    def __post_init__(self) -> None:
        """Check the length. UserError: no segment fits in beside the special tokens."""
        if self.sequence_length < 2 * self.special:
            raise UserError(
                f"zero_tp.data.sequence_length: {self.sequence_length} tokens, of which the masked objective's special "
                f"ones are {self.special}; use at least {2 * self.special}"
            )

    @property
    def special(self) -> int:
        """Return the special tokens of a row, which are also the tokens of the shortest document: one for each
        segment, and the one that may end it."""
        return 3 if self.sentence_order else 2

    def windows(self, corpus: IndexedCorpus) -> DocumentWindows:
        """Return the windows of a corpus. UserError: no document is long enough for one."""
        windows = DocumentWindows(corpus, self.sequence_length - self.special, self.special)
        if not len(windows):
            raise UserError(
                f"{corpus.prefix}: no document has the {self.special} tokens that the masked objective needs for "
                f"{'two segments' if self.sentence_order else 'a segment'}; prepare a corpus of longer documents"
            )
        return windows

    def row(self, windows: DocumentWindows, w: int, draw: Iterator[float]) -> dict[str, npt.NDArray[np.int64]]:
        """Return window w as the row of a batch, by the batch's names. Its random choices are those of `draw`."""
        tokens, begins = self._window(windows, w)
        if not self.sentence_order:
            return self._assemble([tokens], False, draw)
        if not len(begins):
            begins = np.flatnonzero(self.masking.vocabulary.word_begins(tokens)[1:]) + 1
        cut = int(begins[int(next(draw) * len(begins))]) if len(begins) else 1 + int(next(draw) * (len(tokens) - 1))
        parts = trimmed([tokens[:cut], tokens[cut:]], self.sequence_length - self.special, draw)
        return self._assemble(parts, next(draw) < 0.5, draw)

    def empty(self) -> dict[str, npt.NDArray[np.int64]]:
        """Return a row that is not scored: padding after a [CLS], because softmax needs one visible token."""
        return self._assemble([], IGNORE_INDEX, iter(()))

    def _assemble(
        self, parts: list[npt.NDArray[np.int64]], swapped: int, draw: Iterator[float]
    ) -> dict[str, npt.NDArray[np.int64]]:
        """Return segments, in the order of the text, as a row with masks; `swapped` is its `next_sentence_label`."""
        vocabulary, s = self.masking.vocabulary, self.sequence_length
        row, types, used = np.full(s, vocabulary.padding, np.int64), np.zeros(s, np.int64), 1
        row[0] = vocabulary.classifier
        for kind, part in enumerate(reversed(parts) if swapped else parts):
            end = used + len(part)
            row[used:end], row[end], types[used : end + 1] = part, vocabulary.separator, kind
            used = end + 1
        labels = np.full(s, IGNORE_INDEX, np.int64)
        if parts:
            row[:used], labels[:used] = self.masking(row[:used], draw)
        mask = (np.arange(s) < used).astype(np.int64)
        batch = {"input_ids": row, "token_type_ids": types, "attention_mask": mask, "labels": labels}
        return batch | ({"next_sentence_label": np.array(swapped, np.int64)} if self.sentence_order else {})

    def _window(self, windows: DocumentWindows, w: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the tokens of window w, without the one that ends documents, and the starts of later sentences."""
        corpus, length = windows.corpus, windows.length
        document, j = windows.locate(w)
        first, size = corpus.extent(document)
        start = j * length
        if start:
            lowest = start - length // 2  # a sentence as long as a window would be all of it each time
            starts = corpus.sequences(first + lowest, start - lowest + 1)
            start = lowest + int(starts[-1]) if len(starts) else start
        stop = min(start + length, size)
        begins = corpus.sequences(first + start + 1, stop - start - 1) + 1
        if self.sentence_order and len(begins):
            after = corpus.sequences(first + stop, min(length, size - stop))
            if len(after) or stop + length >= size:
                stop = stop + int(after[0]) if len(after) else size
            else:  # a sentence as long as a window: its end would tell which segment is the later one
                begins = begins[:0]
        tokens = corpus.read(first + start, stop - start)
        if stop == size and tokens[-1] == self.masking.vocabulary.end:
            tokens = tokens[:-1]
        return tokens, begins[begins < len(tokens)]


def _batch(rows: Sequence[dict[str, npt.NDArray[np.int64]]]) -> MaskedBatch:
    return MaskedBatch({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


class MaskedSamples(TrainingSamples[MaskedBatch]):
    """Training samples of the masked objective, one infinite sequence: see `TrainingSamples`.

    The place where segments meet, their order and the masks are drawn for each sample from (seed, its number).

    Args:
        prefixes: corpus prefix → weight, in any unit (only their proportions count).
        pairs: makes the rows.
        seed: of the order and of the rows.
    """

    def __init__(self, prefixes: Mapping[str, float], pairs: SegmentPairs, seed: int) -> None:
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        self.pairs, self._windows = pairs, [pairs.windows(corpus) for corpus in corpora]
        super().__init__(prefixes, corpora, [len(windows) for windows in self._windows], seed)

    def identities(self, *, whole: bool = True) -> dict[str, dict[str, Any]]:
        """Return prefix → what its corpus is, and `vocabulary`: what masking knows of the tokenizer, hashed."""
        vocabulary = {"vocabulary": self.pairs.masking.vocabulary.sha256()}
        return {prefix: identity | vocabulary for prefix, identity in super().identities(whole=whole).items()}

    def __getitem__(self, k: int) -> dict[str, npt.NDArray[np.int64]]:
        """Return sample k as a row of a batch, int64 [s] each and `next_sentence_label` []."""
        corpus, _, window = (int(part[0]) for part in self.sources(np.array([k])))
        return self.pairs.row(self._windows[corpus], window, uniforms(self.seed, _TRAINING, k))

    def _batch(self, numbers: range) -> MaskedBatch:
        return _batch([self[k] for k in numbers])


class MaskedValidation(FixedSamples[MaskedBatch]):
    """Validation samples of the masked objective: all windows of held-out corpora, with the same masks each time."""

    def __init__(self, prefixes: Iterable[str], pairs: SegmentPairs) -> None:
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        self.pairs, self._windows = pairs, [pairs.windows(corpus) for corpus in corpora]
        super().__init__(corpora, [len(windows) for windows in self._windows])

    def _batch(self, numbers: list[int], rows: int) -> MaskedBatch:
        batch = [self.pairs.empty()] * rows
        for i, n in enumerate(numbers):
            corpus, w = self._locate(n)
            batch[i] = self.pairs.row(self._windows[corpus], w, uniforms(_VALIDATION, n))
        return _batch(batch)
