"""A corpus, or a blend of several, as PyTorch's two kinds of data set.

They serve plain loops and `transformers.Trainer`.

Both yield the samples of `PackedSamples`, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.data.batch import positions_of
from zero_tp.data.samples import PackedSamples

Prefixes = str | Path | Mapping[str, float]


class CorpusDataset(Dataset[dict[str, Tensor]]):
    """A corpus as a map-style data set.

    Item k has `input_ids` and `labels`, int64 [s] each, the same ids.

    It is already shuffled, in a new order for each pass.

    Args:
        prefixes: a corpus' prefix, or prefix → weight of several.
        sequence_length: s.
        seed: seed of the order.
        samples: the length, also beyond one pass; None: one pass over all corpora.
        separate: add `position_ids`, which restart with each document: transformers' attention then
            separates the documents. A document's first token is no label.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        sequence_length: int,
        seed: int = 1234,
        samples: int | None = None,
        *,
        separate: bool = False,
    ) -> None:
        weights = dict(prefixes) if isinstance(prefixes, Mapping) else {str(prefixes): 1.0}
        if sequence_length < 2 or (samples is not None and samples < 1):
            raise UserError(
                f"sequence_length {sequence_length} must be at least 2, and samples {samples} at "
                "least 1"
            )
        self._packed = PackedSamples(weights, sequence_length, seed, separate=separate)
        self._count = sum(self._packed.windows) if samples is None else samples

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        if not 0 <= k < len(self):
            raise IndexError(f"sample {k} of {len(self)}")
        return self.sample(k)

    def sample(self, k: int) -> dict[str, Tensor]:
        """Return sample k, of any pass. Hugging Face models shift the labels themselves."""
        # s of the s + 1 tokens: Hugging Face models shift labels inside, so the target of the last
        # position is not used.
        ids = torch.from_numpy(self._packed[k][:-1])
        item = {"input_ids": ids, "labels": ids.clone()}
        if self._packed.separate:
            item["position_ids"] = positions_of(self._packed.document_ids([k])[:, :-1])[0]
            # After the shift, this label would be predicted by the last token of the document
            # before.
            item["labels"][item["position_ids"] == 0] = IGNORE_INDEX
        return item


class CorpusStream(IterableDataset[dict[str, Tensor]]):
    """A corpus as an iterable data set.

    It yields the items of `CorpusDataset`, divided among ranks and a DataLoader's workers.

    Worker w of W of rank r of R yields the items k with (k - first) mod (R·W) = r·W + w.

    Args:
        first: the number of the first sample, for example the number of samples that a run has
            seen.
        samples: their number from `first` on, over all ranks; None: without end.
        rank, world: this rank, and the number of ranks.
    """

    def __init__(
        self,
        prefixes: Prefixes,
        sequence_length: int,
        seed: int = 1234,
        samples: int | None = None,
        *,
        first: int = 0,
        rank: int = 0,
        world: int = 1,
        separate: bool = False,
    ) -> None:
        if not 0 <= rank < world or first < 0:
            raise UserError(
                f"rank {rank} of {world} must be from 0 to {world - 1}, and first {first} at least "
                "0"
            )
        self._dataset = CorpusDataset(prefixes, sequence_length, seed, samples, separate=separate)
        self._first = first
        self._count = samples
        self._rank = rank
        self._world = world

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()
        # A DataLoader copies the data set to each worker, and each copy must yield its own part.
        number, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        k = self._first + self._rank * workers + number
        while self._count is None or k < self._first + self._count:
            # `sample` and not an index: k may be beyond one pass.
            yield self._dataset.sample(k)
            k += self._world * workers
