"""The tokens that validation scores: the same fixed samples every time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic

import numpy as np
import torch

from zero_tp.data.batch import PADDING, Batch, separate_documents
from zero_tp.data.indexed import IndexedCorpus
from zero_tp.data.samples import BatchType, check_windows, count_targets


class FixedSamples(ABC, Generic[BatchType]):
    """Validation samples: the windows of held-out corpora in a fixed order, corpus after corpus.

    A figure of several corpora is the mean of the corpora's own figures, weighted with `shares`. To
    compute the figure of a corpus, sum the losses and divide by the number of labels that aren't
    -100: a mean of batch means would weigh padding.

    Args:
        prefixes: corpus prefix → weight, in any unit; without weights they are equal.
        corpora, windows: the corpora in that order, and the number of windows of each.
    """

    def __init__(
        self, prefixes: Collection[Any], corpora: list[IndexedCorpus], windows: list[int]
    ) -> None:
        check_windows(corpora, windows)
        self.corpora = corpora
        self.windows = windows
        weights = list(prefixes.values()) if isinstance(prefixes, Mapping) else [1.0] * len(corpora)
        self._weights = [weight / sum(weights) for weight in weights]
        self._first = np.concatenate([[0], np.cumsum(windows)])

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self._first[-1])

    def shares(self, limit: int) -> list[tuple[float, int]]:
        """Return (share in the weights, number of windows) of each corpus.

        Its windows are its share of `limit`, at least one.
        """
        # At least one, because a corpus without a window would have no figure.
        return [(weight, max(1, round(limit * weight))) for weight in self._weights]

    def _locate(self, i: int) -> tuple[int, int]:
        """Return the corpus of window i, and the window's number in it."""
        corpus = int(np.searchsorted(self._first, i, side="right")) - 1
        return corpus, i - int(self._first[corpus])

    @abstractmethod
    def _batch(self, numbers: list[int], rows: int) -> BatchType:
        """Return windows as the first rows of a batch of `rows`.

        The other rows have only labels -100.
        """

    def batches(
        self,
        limit: int | None,
        micro_batch: int,
        data_rank: int,
        data_size: int,
        corpus: int | None = None,
    ) -> Iterator[BatchType]:
        """Yield one rank's batches.

        All have one shape, and every rank has as many: ZeRO-3 gathers weights in lock-step.

        Five windows, m = 2, d = 2; a dot is a row without labels:

            first batch     rank 0: 0 1    rank 1: 2 3
            second batch    rank 0: 4 .    rank 1: . .

        Args:
            limit: windows to score over all ranks, evenly spread; None: all. The topology never
                changes which they are.
            micro_batch: m rows a batch; rows beyond the last window have only labels -100.
            corpus: the number of a corpus; None: the windows of all.
        """
        assert 0 <= data_rank < data_size
        offset, total = (
            (0, len(self)) if corpus is None else (int(self._first[corpus]), self.windows[corpus])
        )
        count = total if limit is None else min(limit, total)
        # Start and end shift equally, so every rank yields the same number of batches.
        for first in range(
            data_rank * micro_batch, count + data_rank * micro_batch, micro_batch * data_size
        ):
            numbers = range(first, min(first + micro_batch, count))
            # Of 10 windows, a limit of 4 takes 0, 2, 5 and 7: spread over the corpus, not its
            # beginning.
            yield self._batch([offset + n * total // count for n in numbers], micro_batch)


class ValidationSamples(FixedSamples[Batch]):
    """Validation samples of the causal objective.

    All held-out tokens but a corpus' first are targets exactly once.

    Windows of s inputs at stride s; the last window of a corpus is padded with token 0 and labels
    -100. With `separate` documents (see batch.py), the first token of each is no target either.
    """

    def __init__(
        self,
        prefixes: str | Path | Collection[str | Path],
        sequence_length: int,
        *,
        separate: bool = False,
    ) -> None:
        self.sequence_length = sequence_length
        self.separate = separate
        prefixes = [prefixes] if isinstance(prefixes, str | Path) else prefixes
        corpora = [IndexedCorpus(prefix) for prefix in prefixes]
        super().__init__(
            prefixes,
            corpora,
            [-(-count_targets(corpus, separate) // sequence_length) for corpus in corpora],
        )

    def _batch(self, numbers: list[int], rows: int) -> Batch:
        s = self.sequence_length
        # Token 0 is in every vocabulary. It is never a label, and it comes after all real tokens,
        # so no real token attends to it.
        windows = torch.zeros(rows, s + 1, dtype=torch.long)
        documents = torch.full_like(windows, PADDING)
        for row, i in enumerate(numbers):
            number, window = self._locate(i)
            corpus = self.corpora[number]
            start = window * s
            count = min(s + 1, corpus.tokens - start)
            windows[row, :count] = torch.from_numpy(corpus.read(start, count))
            documents[row, :count] = (
                torch.from_numpy(corpus.document_ids(start, count)) if self.separate else 0
            )
        batch = separate_documents(windows, documents)
        return batch if self.separate else Batch(batch.input_ids, batch.labels)
