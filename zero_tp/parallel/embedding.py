"""The embedding, split over the vocabulary (arXiv 1909.08053, section 3).

v vocabulary, h hidden, t TP size. Each rank holds ⌈v/t⌉ rows; rows past v are zeros and unused.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.collectives import (
    group_size,
    reduce_from_tensor_region,
    reduce_scatter_to_sequence_region,
)
from zero_tp.parallel.cpu.heap import return_freed_memory, returns_freed_memory
from zero_tp.parallel.layout import split_vocabulary, vocab_shard_range
from zero_tp.parallel.parameter import Normal, ParameterMaker


class VocabParallelEmbedding(nn.Module):
    """Look up this rank's rows, then sum over TP: all-reduce (f̄), or under SP reduce-scatter (ḡ).

    With 5 tokens and TP 2, rank 0 holds rows 0 to 2, rank 1 rows 3 and 4. Of the tokens 4, 1, 3:

        rank 0    0   e1  0
        rank 1    e4  0   e3
        sum       e4  e1  e3

    Args:
        padding_token: its row starts as zeros and gets no gradient, as in torch's Embedding.
    """

    def __init__(
        self,
        make: ParameterMaker,
        vocabulary: int,
        hidden: int,
        *,
        init: Normal,
        padding_token: int | None = None,
    ):
        super().__init__()
        self.group = make.topology.tensor_group
        init = replace(init, zero_row=padding_token)
        self.weight = make.parameter(
            "weight", (vocabulary, hidden), split_vocabulary(vocabulary), init
        )
        self.first, self.count = vocab_shard_range(
            vocabulary, make.topology.tensor_rank, make.topology.tensor
        )
        # Only the rank that holds the padding token's row leaves its gradient out.
        row = -1 if padding_token is None else padding_token - self.first
        self.padding_row = row if 0 <= row < self.count else None

    def forward(self, tokens: Tensor, *, sequence: bool) -> Tensor:
        """Look up token ids [s, b] → [s, b, h], or this rank's [s/t, b, h] when `sequence`."""
        if group_size(self.group) == 1:
            return self._rows(tokens)
        local = tokens - self.first
        remote = (local < 0) | (local >= self.count)
        # Row 0 stands for tokens of other ranks, because an index must be in range. Masking its
        # values also keeps their gradients from row 0.
        embedded = self._rows(local.masked_fill(remote, 0))
        embedded = embedded.masked_fill(remote.unsqueeze(-1), 0.0)
        # Under SP the next norm needs this rank's positions only. A ring's all-reduce is a
        # reduce-scatter and an all-gather, so this sends half as much.
        reduce = reduce_scatter_to_sequence_region if sequence else reduce_from_tensor_region
        return reduce(embedded, self.group)

    def _rows(self, indices: Tensor) -> Tensor:
        """Return these of this rank's rows."""
        rows = F.embedding(indices, self.weight, self.padding_row)
        if returns_freed_memory() and rows.requires_grad:
            # The weight's gradient is one large block, where activations have left small ones.
            rows.register_hook(lambda _: return_freed_memory())
        return rows
