"""A batch holds rows of packed documents for one forward.

With `data.document_attention` "reset" the pieces of documents that lie in one window are trained on as if each were a
row of its own: a token sees the tokens of its piece alone, positions count from 0 at the piece's start, and a piece's
last token predicts nothing, as nothing follows it in a row of its own. A window that begins inside a document holds a
piece that begins there, at position 0: what the document held before belongs to another sample. These are
`reset_attention_mask`, `reset_position_ids` and `eod_mask_loss` of Megatron-LM, all three at once; but where documents
begin is read from the index and not guessed from end-of-document tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX

PADDING = -1
"""The document number of a token that fills a row up."""


class Batch(NamedTuple):
    """A batch holds the rows of one forward, each field int64 [m, s].

    Attributes:
        labels: already shifted: the token after each of `input_ids`, or -100: score nothing.
        position_ids, document_ids: each token's position in its piece of a document, and the document's number; None
            where attention and positions run on over the documents.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None

    def to(self, device: torch.device) -> Batch:
        """Move it; to an accelerator by page-locked memory, for which the host does not wait.

        The documents' numbers stay: the host alone reads them.
        """
        positions = None if self.position_ids is None else _moved(self.position_ids, device)
        return Batch(_moved(self.input_ids, device), _moved(self.labels, device), positions, self.document_ids)

    def arguments(self) -> dict[str, Any]:
        """Return what a `CausalLM` takes beside the input ids."""
        return {
            "shift_labels": self.labels,
            "position_ids": self.position_ids,
            "document_ids": self.document_ids,
        }


class MaskedBatch(dict[str, Tensor]):
    """A batch of the masked objective has the arguments of transformers' BertForPreTraining, int64.

    - `input_ids`, `token_type_ids` (0 for [CLS] A [SEP], 1 for B [SEP]), `attention_mask` (0: padding), [m, s].
    - `labels` [m, s]: the token that was masked there, or -100.
    - `next_sentence_label` [m]: 0 where the segments are in order, 1 where they are swapped, -100 in an empty row; none
      where rows have one segment.
    - `label_places` [n], which `to` adds: where labels are not -100, counted row after row.
    """

    @property
    def input_ids(self) -> Tensor:
        return self["input_ids"]

    @property
    def labels(self) -> Tensor:
        return self["labels"]

    def to(self, device: torch.device) -> MaskedBatch:
        """Move it as `Batch.to` does. The host finds the places of the labels: for an accelerator it would wait."""
        places = (self.labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)
        return MaskedBatch({name: _moved(part, device) for name, part in {"label_places": places, **self}.items()})

    def arguments(self) -> dict[str, Any]:
        """Return what a `MaskedLM` takes beside the input ids."""
        return {name: part for name, part in self.items() if name != "input_ids"}


AnyBatch = Batch | MaskedBatch


def as_batch(given: AnyBatch | tuple[Tensor, Tensor] | Mapping[str, Tensor]) -> AnyBatch:
    """Return a batch as it is, a Batch of (input ids, shifted labels), or a MaskedBatch of tensors by name."""
    if isinstance(given, Batch | MaskedBatch):
        return given
    return MaskedBatch(given) if isinstance(given, Mapping) else Batch(*given)


def _moved(part: Tensor, device: torch.device) -> Tensor:
    return part if part.device.type == device.type else part.pin_memory().to(device, non_blocking=True)


def continued(windows: Tensor) -> Batch:
    """Make a batch of windows [m, s + 1] that are one text each: every token predicts the next."""
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def separated(windows: Tensor, documents: Tensor) -> Batch:
    """Make a batch of windows [m, s + 1] whose documents are kept apart; their numbers, [m, s + 1], say which is whose.

    A token of document PADDING is never a label.
    """
    after = documents[:, 1:]
    labels = windows[:, 1:].masked_fill((after != documents[:, :-1]) | (after == PADDING), IGNORE_INDEX)
    own = documents[:, :-1].contiguous()
    return Batch(windows[:, :-1].contiguous(), labels, positions_of(own), own)


def positions_of(documents: Tensor) -> Tensor:
    """Return each token's position among its neighbours of the same document, from 0. [m, s] → [m, s]."""
    column = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return column - column.masked_fill(~begins, 0).cummax(1).values
