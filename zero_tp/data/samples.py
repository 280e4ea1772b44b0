"""The tokens that training step k sees.

Step k trains on the samples k·B … (k+1)·B - 1 of one infinite sequence, a pure function of the
corpora, their weights, the sequence length and the seed. TP, DP, micro-batch and accumulation only
decide which rank reads which samples. Any sample is computed from its number alone, so resuming
needs no state but the step.

Letters: s sequence length, B global batch, m micro-batch, d data-parallel size, a accumulation
steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.data.batch import Batch, MaskedBatch, separate_documents
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.permutation import Permutation

BatchType = TypeVar("BatchType", Batch, MaskedBatch)

# A table of one period makes any sample O(1). A shorter one would round weights more coarsely.
BLEND_PERIOD = 10_000
"""The schedule's length in samples; a corpus gets its share of them to within 0.01 %."""


class TrainingSamples(ABC, Generic[BatchType]):
    """Training samples: one infinite sequence, numbered from 0.

    An epoch of a corpus has each of its windows once, in an order that is a pure function of (seed,
    epoch, index of the corpus in `weights`), not of paths, so a corpus can move.

    Several corpora are interleaved as Megatron-LM blends them: the next sample comes from the
    corpus with the largest deficit. The schedule repeats every `BLEND_PERIOD` samples, with weights
    rounded to that resolution.

    Cost: O(1) time and memory for any k, no replay; a blend holds a table of 10,000 × 2 integers.

    Args:
        weights: corpus prefix → weight, in any unit (only their proportions count).
        corpora, windows: the corpora in that order, and the number of windows of each.
        length: tokens of a sample.
        seed: seed of the order.

    Attributes:
        numbers: of each corpus in the order's key; its index, unless `chain` has set it.
        offsets: windows of each corpus that earlier sequences of the run have read.
        first_number: number of samples of those sequences.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        corpora: list[IndexedCorpus],
        windows: list[int],
        length: int,
        seed: int,
    ) -> None:
        check_windows(corpora, windows)
        self.corpora = corpora
        self.windows = windows
        self.length = length
        self.seed = seed
        self.numbers = list(range(len(corpora)))
        self.offsets = [0] * len(corpora)
        self.first_number = 0
        self._blend = _Blend(weights)

    def identity(self, corpus: IndexedCorpus, *, hash_tokens: bool = True) -> dict[str, Any]:
        """Return what a checkpoint records of a corpus: `IndexedCorpus.identity`."""
        return corpus.identity(hash_tokens=hash_tokens)

    def locate(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus, the epoch and the window of each sample, int64 like `numbers`."""
        if (numbers < 0).any():
            raise IndexError(f"sample {numbers.min()}")
        corpora, counts = self._blend.locate(numbers)
        counts = counts + np.array(self.offsets)[corpora]
        epochs, positions = np.divmod(counts, np.array(self.windows)[corpora])
        windows = np.empty_like(numbers)
        # A batch touches few pairs of corpus and epoch, and each has a permutation of its own.
        for corpus, epoch in set(zip(corpora.tolist(), epochs.tolist(), strict=True)):
            selected = (corpora == corpus) & (epochs == epoch)
            order = Permutation(self.windows[corpus], self.seed, epoch, self.numbers[corpus])
            windows[selected] = order.entries(positions[selected])
        return corpora, epochs, windows

    def windows_read(self, samples: int) -> list[int]:
        """Return how many windows of each corpus the first `samples` samples read."""
        return self._blend.counts(samples)

    def batches_from(
        self, first: int, micro_batch: int, accumulation: int, data_rank: int, data_size: int
    ) -> list[BatchType]:
        """Return the a batches of m rows that one data-parallel rank trains on in a step.

        Micro-batch i of rank r holds the m samples from first + i·d·m + r·m on, so together the
        ranks hold each sample of the step exactly once. The TP ranks of one data-parallel rank get
        the same batches. A global batch of 8, m = 2, a = 2, d = 2; samples counted from `first`:

            micro-batch 0    rank 0: 0 1    rank 1: 2 3
            micro-batch 1    rank 0: 4 5    rank 1: 6 7

        Read line by line, the rows are the global batch itself, whatever m, a and d are.
        """
        assert 0 <= data_rank < data_size
        firsts = (first + (i * data_size + data_rank) * micro_batch for i in range(accumulation))
        return [self._batch(range(number, number + micro_batch)) for number in firsts]

    @abstractmethod
    def _batch(self, numbers: range) -> BatchType:
        """Return samples as the rows of a batch."""


class PackedSamples(TrainingSamples[Batch]):
    """Training samples of the causal objective.

    `samples[k]` is int64 [s + 1], inputs `[:-1]` and targets `[1:]`.

    A corpus' token stream is cut into windows of s + 1 tokens at stride s, so an epoch has each
    target exactly once (except in the tail of fewer than s tokens, which fills no window). Ten
    tokens and s = 4: neighbouring windows share a token, target of one and input of the other.

        t0 t1 t2 t3 t4                  window 0
                    t4 t5 t6 t7 t8      window 1; t9 is in no window

    With `separate`, the documents of a sample are separate (see batch.py); its token ids are the
    same.

    Raises:
        UserError: no corpus, a weight that isn't a positive number or too small a share, a corpus
            shorter than s + 1 tokens, or one without anything to predict.
    """

    def __init__(
        self,
        prefixes: Mapping[str, float],
        sequence_length: int,
        seed: int,
        *,
        separate: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self.separate = separate
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        windows = [count_targets(corpus, separate) // sequence_length for corpus in corpora]
        super().__init__(prefixes, corpora, windows, sequence_length, seed)

    def __getitem__(self, k: int) -> npt.NDArray[np.int64]:
        row: npt.NDArray[np.int64] = self._rows([k], IndexedCorpus.read)[0].numpy()
        return row

    def _batch(self, numbers: range) -> Batch:
        windows = self._rows(numbers, IndexedCorpus.read)
        if self.separate:
            return separate_documents(windows, self.document_ids(numbers))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def document_ids(self, numbers: Iterable[int]) -> Tensor:
        """Return the numbers of the documents of samples' tokens, int64 [samples, s + 1]."""
        return self._rows(numbers, IndexedCorpus.document_ids)

    def _rows(
        self,
        numbers: Iterable[int],
        read: Callable[[IndexedCorpus, int, int], npt.NDArray[np.int64]],
    ) -> Tensor:
        s = self.sequence_length
        corpora, _, windows = self.locate(np.fromiter(numbers, np.int64))
        rows = np.empty((len(corpora), s + 1), np.int64)
        for row, corpus, window in zip(rows, corpora.tolist(), windows.tolist(), strict=True):
            row[:] = read(self.corpora[corpus], window * s, s + 1)
        return torch.from_numpy(rows)


def chain(sequences: Sequence[TrainingSamples[Any]], ends: Sequence[int]) -> None:
    """Let each sequence of a run go on in every corpus where those before it have stopped.

    With samples of the same length a corpus goes on with its next window. With another length its
    windows are others, and it begins the next epoch. A corpus of 10 windows of 8 tokens, which are
    5 of 16:

        sequence 0    length 8     23 samples    epochs 0, 1 and three windows of epoch 2
        sequence 1    length 8     4 samples     windows 3 to 6 of epoch 2
        sequence 2    length 16    7 samples     epoch 3, then two windows of epoch 4

    Args:
        ends: number of samples of each sequence.
    """
    prefixes = list(dict.fromkeys(one.prefix for part in sequences for one in part.corpora))
    read: dict[str, tuple[int, int, int]] = {}
    total = 0
    for samples, end in zip(sequences, ends, strict=True):
        samples.first_number = total
        samples.numbers = [prefixes.index(corpus.prefix) for corpus in samples.corpora]
        for index, (corpus, windows) in enumerate(
            zip(samples.corpora, samples.windows, strict=True)
        ):
            length, earlier, count = read.get(corpus.prefix, (samples.length, windows, 0))
            same = length == samples.length
            samples.offsets[index] = count if same else -(-count // earlier) * windows
        counts = zip(
            samples.corpora,
            samples.windows,
            samples.offsets,
            samples.windows_read(end),
            strict=True,
        )
        for corpus, windows, offset, count in counts:
            read[corpus.prefix] = (samples.length, windows, offset + count)
        total += end


def count_targets(corpus: IndexedCorpus, separate: bool) -> int:
    """Return the number of tokens but the first.

    0 if documents are separate and none has a second token to predict.
    """
    return 0 if separate and not corpus.has_document_with(2) else max(0, corpus.tokens - 1)


def check_windows(corpora: list[IndexedCorpus], windows: list[int]) -> None:
    """Check that there are corpora, and that each has a window. UserError: one has none."""
    if not corpora:
        raise UserError("zero_tp.data: no corpus; name at least one prefix")
    for corpus, count in zip(corpora, windows, strict=True):
        if count < 1:
            raise UserError(
                f"{corpus.prefix}: its {len(corpus):,} documents of {corpus.tokens:,} tokens are "
                "too short for a "
                "sample; use longer documents or a smaller zero_tp.data.sequence_length"
            )


class _Blend:
    """The schedule of several corpora: which corpus each sample comes from.

    Weights 3 : 1 of the corpora A and B. `before` numbers the samples of each corpus:

        sample    0   1   2   3   4   5   6   7   …  10,000
        corpus    A   A   B   A   A   A   B   A   …  A
        before    0   1   0   2   3   4   1   5   …  7,500
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        for prefix, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise UserError(f"weight {weight} of {prefix}: a positive number is needed")
        self.period = 1 if len(weights) == 1 else BLEND_PERIOD
        # Largest remainders: round down, then give the samples that are left to the largest
        # fractions. A plain rounding need not add up to the period.
        exact = np.array([weight / total * self.period for weight in weights.values()])
        self.shares = np.floor(exact).astype(np.int64)
        # Stable, because equal fractions must be ordered alike by every version of NumPy.
        by_remainder = np.argsort(self.shares - exact, kind="stable")
        self.shares[by_remainder[: self.period - self.shares.sum()]] += 1
        for prefix, share in zip(weights, self.shares, strict=True):
            if share == 0:
                raise UserError(
                    f"weight {weights[prefix]} of {prefix} is {weights[prefix] / total:.1e} of the "
                    "total: "
                    f"at least {1 / BLEND_PERIOD:g} is needed"
                )
        self._corpus, self._before = self._schedule()

    def _schedule(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        corpus = np.zeros(self.period, np.int64)
        before = np.zeros(self.period, np.int64)
        counts = np.zeros_like(self.shares)
        for i in range(self.period):
            # Integers, because rounding must not change the schedule. Ties go to the first corpus.
            # The deficit of a corpus after i samples is share · (i + 1) / period - count, here
            # times the period.
            next_corpus = int(np.argmax(self.shares * (i + 1) - counts * self.period))
            corpus[i], before[i] = next_corpus, counts[next_corpus]
            counts[next_corpus] += 1
        assert (counts == self.shares).all()
        return corpus, before

    def locate(
        self, numbers: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the corpus of each sample, and the number of samples of that corpus before it."""
        periods, i = np.divmod(numbers, self.period)
        corpora = self._corpus[i]
        # Every period takes exactly its share of each corpus, so earlier periods need no table.
        return corpora, periods * self.shares[corpora] + self._before[i]

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each corpus among the first `samples`."""
        periods, rest = divmod(samples, self.period)
        of_rest = np.bincount(self._corpus[:rest], minlength=len(self.shares))
        counts: list[int] = (periods * self.shares + of_rest).tolist()
        return counts
