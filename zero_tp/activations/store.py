"""Where the inputs of recomputed modules wait for backward: in place, or split over the TP group (P_a).

Host memory (offload.py) and one preallocated buffer (contiguous.py) are stores too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Size, Tensor

from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size


class Store(Protocol):
    """A store gives a token for a tensor, and later the tensor for the token."""

    def put(self, tensor: Tensor) -> Any:
        """Keep a tensor, which the caller does not change afterwards. Return a token; dropping it frees the space."""

    def take(self, token: Any) -> Tensor:
        """Return the tensor of a token, bit for bit, on the device where it was."""


class InPlace:
    """This store keeps the tensor where it is."""

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self, token: Tensor) -> Tensor:
        return token


@dataclass(frozen=True)
class _Piece:
    token: Any
    shape: Size


class Partitioned:
    """P_a keeps one t-th of each tensor in another store and gathers the whole just before use (arXiv 1910.02054,
    section 6.1).

    Right only for tensors that are equal on all TP ranks: the residual stream without sequence parallelism. Under SP
    each rank's checkpoint is its own, and this would mix them.
    """

    def __init__(self, group: Group, store: Store):
        self.group, self.store = group, store

    def put(self, tensor: Tensor) -> _Piece:
        """Keep this rank's piece of ⌈numel/t⌉ elements, padded where t does not divide. No communication."""
        size = group_size(self.group)
        length = -(-tensor.numel() // size)
        piece = tensor.flatten()[group_rank(self.group) * length :][:length]
        # A view would keep the whole tensor.
        piece = F.pad(piece, (0, length - piece.numel())) if piece.numel() < length else piece.clone()
        return _Piece(self.store.put(piece), tensor.shape)

    def take(self, token: _Piece) -> Tensor:
        """Gather the pieces over the TP group. [⌈numel/t⌉] → the tensor's shape."""
        whole = all_gather(self.store.take(token.token), self.group)
        return whole[: token.shape.numel()].view(token.shape)
