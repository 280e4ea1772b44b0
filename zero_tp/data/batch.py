"""Batches of packed documents for one forward pass, and the thread that reads them ahead.

With `data.document_attention` "reset" a token attends only to its own document in the window,
positions restart with each document, and a document's last token predicts nothing. The rest of a
document from an earlier window counts as a document, with positions from 0. These are
`reset_attention_mask`, `reset_position_ids` and `eod_mask_loss` of Megatron-LM together, but
documents' starts are read from the index and not guessed from end-of-document tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from zero_tp.base.constants import IGNORE_INDEX

T = TypeVar("T")

PADDING = -1
"""The document number of padding."""


class Batch(NamedTuple):
    """The rows of one forward, each field int64 [m, s].

    Attributes:
        labels: already shifted: the token after each of `input_ids`, or -100, which is not scored.
        position_ids, document_ids: each token's position in its document, and the document's
            number; None if attention and positions span the whole row.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device asynchronously.

        Document numbers stay on the host, where they are read.
        """
        positions = None if self.position_ids is None else _move(self.position_ids, device)
        return Batch(
            _move(self.input_ids, device), _move(self.labels, device), positions, self.document_ids
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `CausalLM` other than the input ids."""
        return {
            "shift_labels": self.labels,
            "position_ids": self.position_ids,
            "document_ids": self.document_ids,
        }


class MaskedBatch(dict[str, Tensor]):
    """A batch of the masked objective: the arguments of transformers' BertForPreTraining, int64.

    - `input_ids`, `token_type_ids` (0 for [CLS] A [SEP], 1 for B [SEP]), `attention_mask` (0:
      padding), [m, s].
    - `labels` [m, s]: the token that was masked, or -100.
    - `next_sentence_label` [m]: 0 if the segments are in order, 1 if they are swapped, -100 for an
      empty row; missing if rows have one segment.
    - `label_places` [n], added by `to`: flat indices of the labels that are not -100.
    """

    @property
    def input_ids(self) -> Tensor:
        return self["input_ids"]

    @property
    def labels(self) -> Tensor:
        return self["labels"]

    def to(self, device: torch.device) -> MaskedBatch:
        """Move it as `Batch.to` does, and add `label_places`.

        The host computes them, because `nonzero` would synchronise with a device.
        """
        places = (self.labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        return MaskedBatch(
            {name: _move(part, device) for name, part in {"label_places": places, **self}.items()}
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a `MaskedLM` other than the input ids."""
        return {name: part for name, part in self.items() if name != "input_ids"}


AnyBatch = Batch | MaskedBatch


def as_batch(batch: AnyBatch | tuple[Tensor, Tensor] | Mapping[str, Tensor]) -> AnyBatch:
    """Return a batch in our form.

    A Batch or MaskedBatch stays as it is. Of two tensors (input ids, shifted labels) it makes a
    Batch, of tensors by name a MaskedBatch.
    """
    if isinstance(batch, Batch | MaskedBatch):
        return batch
    return MaskedBatch(batch) if isinstance(batch, Mapping) else Batch(*batch)


def _move(part: Tensor, device: torch.device) -> Tensor:
    return (
        part if part.device.type == device.type else part.pin_memory().to(device, non_blocking=True)
    )


def separate_documents(windows: Tensor, documents: Tensor) -> Batch:
    """Return a batch of windows [m, s + 1] whose documents do not attend to each other.

    A window of the end of document 4 and the beginning of document 5:

        windows      a7 a8 b0 b1 b2     document_ids    4  4  5  5
        input_ids    a7 a8 b0 b1        position_ids    0  1  0  1
        labels       a8  ∅ b1 b2        ∅: -100, because a8 says nothing about b0

    Args:
        documents: each token's document, [m, s + 1]; a token of document PADDING is never a label.
    """
    inputs = documents[:, :-1].contiguous()
    targets = documents[:, 1:]
    labels = windows[:, 1:].masked_fill((targets != inputs) | (targets == PADDING), IGNORE_INDEX)
    return Batch(windows[:, :-1].contiguous(), labels, positions_of(inputs), inputs)


def positions_of(documents: Tensor) -> Tensor:
    """Return each token's position in its document. [m, s] → [m, s].

    Positions count from 0 at the document's first token in the row.
    """
    # Documents 4 4 5 5 5: columns of the first tokens 0 0 2 0 0, their running maximum 0 0 2 2 2,
    # positions 0 1 0 1 2. No loop over documents, whose number differs between rows.
    column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return column - column.masked_fill(~begins, 0).cummax(1).values


class ReadAhead(Generic[T]):
    """Reads the next step's batches, up to step `last`, in a thread.

    A context manager, whose end is that of the thread.

    The batches of a step depend on its number alone.
    """

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self._read = read
        self._last = last
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._pending: tuple[int, Future[T]] | None = None

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int) -> T:
        """Return the batches of `step`, and start to read the next ones.

        It raises the errors of reading them.
        """
        pending = self._pending
        self._pending = None
        # Another step than the pending one is read at once: the order of steps is the caller's.
        batches = (
            pending[1].result() if pending is not None and pending[0] == step else self._read(step)
        )
        # No step after the last one: its samples would be read in vain, while the run saves and
        # ends.
        if step < self._last:
            self._pending = step + 1, self._thread.submit(self._read, step + 1)
        return batches
