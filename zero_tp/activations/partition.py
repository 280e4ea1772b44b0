"""P_a: checkpoints split over the TP group (arXiv 1910.02054, section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Size, Tensor

from zero_tp.activations.store import Store
from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size


@dataclass(frozen=True)
class _Piece:
    token: Any
    shape: Size


class Partitioned:
    """Keeps one t-th of each tensor in another store and gathers the whole just before use.

    Right only for tensors that are equal on all TP ranks: the residual stream without sequence parallelism. Under SP
    each rank's checkpoint is its own, and this would mix them.
    """

    def __init__(self, group: Group, store: Store):
        self.group, self.store = group, store

    def put(self, tensor: Tensor) -> _Piece:
        """No communication. A size that does not divide by t is padded: the piece has ⌈numel/t⌉ elements."""
        size = group_size(self.group)
        length = -(-tensor.numel() // size)
        piece = tensor.flatten()[group_rank(self.group) * length :][:length]
        # A view would keep the whole tensor.
        piece = F.pad(piece, (0, length - piece.numel())) if piece.numel() < length else piece.clone()
        return _Piece(self.store.put(piece), tensor.shape)

    def take(self, token: _Piece) -> Tensor:
        """All-gather over the TP group. [⌈numel/t⌉] → the tensor's shape."""
        whole = all_gather(self.store.take(token.token), self.group)
        return whole[: token.shape.numel()].view(token.shape)
