"""The state that all layers of a forward share: masks, rotary tables, cache, and whether it runs on
sequence shards.

s queries, k keys, b batch. Keys are the tokens that a cache still holds and the queries themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from zero_tp.model.architectures.spec import Rotary
from zero_tp.model.position import Rotation
from zero_tp.model.router_balance import ChoiceCount
from zero_tp.model.router_loss import RouterLoss

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from zero_tp.parallel.grouped_linear import Route


@dataclass(frozen=True)
class PackedSequences:
    """The documents packed in a batch's rows. A sequence is a run of tokens of one document in one
    row.

    Two rows of 6 tokens. B goes on in the second row, as a sequence of its own:

        token         0 1 2 3 4 5 | 6 7 8 9 10 11
        document      A A A A B B | B C C C C  C
        cu_seqlens    0, 4, 6, 7, 12              max_seqlen 5

    Attributes:
        cu_seqlens: where each of n sequences begins among all b·s tokens, and b·s at the end, int32
            [n + 1].
        max_seqlen: length of the longest sequence, or an upper bound.
        batch, length: b and s.
    """

    cu_seqlens: Tensor
    max_seqlen: int
    batch: int
    length: int

    @classmethod
    def from_document_ids(cls, document_ids: Tensor, device: torch.device) -> PackedSequences:
        """Start a sequence at each row and wherever `document_ids` [b, s] change; computed on
        the host.
        """
        # On the host, because the kernels take the greatest length as a Python int: computed on a
        # device, it would synchronise.
        ids = document_ids.cpu().numpy()
        begins = np.ones(ids.shape, dtype=bool)
        # A row's first token begins a sequence, even where its document began in the row before.
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        cu_seqlens = np.append(np.flatnonzero(begins), ids.size).astype(np.int32)
        return cls.from_cu_seqlens(cu_seqlens, document_ids.shape, device)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: npt.NDArray[np.int32], shape: torch.Size, device: torch.device
    ) -> PackedSequences:
        """Copy `cu_seqlens` from the host to the device. `shape` is [b, s]."""
        # Pinned, so that the copy can be asynchronous.
        # From a list, because torch cannot pin a copy of an array.
        on_host = torch.tensor(
            cu_seqlens.tolist(), dtype=torch.int32, pin_memory=device.type != "cpu"
        )
        return cls(on_host.to(device, non_blocking=True), int(np.diff(cu_seqlens).max()), *shape)

    @classmethod
    def one_per_row(cls, batch: int, length: int, device: torch.device) -> PackedSequences:
        cu_seqlens = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        return cls(cu_seqlens, length, batch, length)

    @property
    def sequence_ids(self) -> Tensor:
        """Return the number of each token's sequence, int64 [b, s]."""
        tokens = torch.arange(
            self.batch * self.length, dtype=torch.int32, device=self.cu_seqlens.device
        )
        # The numbers start at 1; masks only compare them.
        return torch.bucketize(tokens, self.cu_seqlens, right=True).view(self.batch, self.length)


def document_ids_from_positions(positions: Tensor) -> Tensor | None:
    """Return each token's document number, [b, s], from `positions` [b, s] that restart; None if
    none restarts.

    transformers reads rows of packed documents in this way. Synchronises with the device.
    """
    # A row may begin at any position, so its first difference is set to 1:
    #     positions     0 1 2 0 1 0
    #     differences   1 1 1 -2 1 -1
    #     documents     0 0 0 1 1 2
    begins = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    return begins.cumsum(1) if begins.any() else None


class VarlenMask(NamedTuple):
    """The arguments of `varlen_attn` that replace a mask tensor.

    A token sees itself and `window` earlier tokens of its sequence; a negative window is unlimited.
    """

    packed: PackedSequences
    window: int


Mask: TypeAlias = "Tensor | VarlenMask | BlockMask | None"
"""What an attention core takes: `AttentionCore.build_mask`."""


@dataclass(frozen=True)
class AttentionMask:
    """The limits on the tokens that a token attends to: causal order, cache, window, documents and
    padding.

    Attributes:
        queries, keys: s and k.
        first_query, first_key: positions of the first ones in the sequence; a windowed cache has
            dropped earlier keys.
        padding_mask: [b, all tokens so far], 1 for a token and 0 for padding; None without padding.
        packed: the documents packed in the rows; None for one document per row.
        window: how many tokens a token sees, itself included (`VarlenMask.window` excludes it);
            None: unlimited.
        causal: a token sees itself and those before it; else all of its row.
    """

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    padding_mask: Tensor | None = None
    packed: PackedSequences | None = None
    window: int | None = None
    causal: bool = True

    @property
    def is_plain(self) -> bool:
        """Return whether SDPA needs no mask tensor: a decoder needs only `is_causal`, an encoder
        nothing.
        """
        if not self.causal:
            return self.padding_mask is None
        # A window that reaches the first key hides nothing.
        windowed = (
            self.window is not None
            and self.first_query + self.queries - self.first_key > self.window
        )
        # SDPA's `is_causal` lets query i see keys up to i. That is this mask if there is no earlier
        # key, or if the only query is the last token, which sees all keys.
        ends_together = self.first_key + self.keys == self.first_query + self.queries
        is_aligned = ends_together and self.queries in (1, self.keys)
        return self.padding_mask is None and self.packed is None and not windowed and is_aligned

    def visible(self, device: torch.device) -> Tensor:
        """Return the mask as booleans, [b or 1, 1, s, k]; [b or 1, 1, 1, k] if not causal.

        A token may see no key, such as padding on the left. It may still predict the row's first
        token, so each attention core gives it the output of transformers' implementation.

        Five tokens of documents A A A B B with a window of 2:

            key        A0 A1 A2 B0 B1
            query A0   x
            query A1   x  x
            query A2      x  x                A0 is outside the window
            query B0            x             A2 is of another document
            query B1            x  x
        """
        if not self.causal:
            return self._visible_bidirectional(device)
        query = torch.arange(self.first_query, self.first_query + self.queries, device=device)[
            :, None
        ]
        # Positions in the sequence, not in the cache: a windowed cache has dropped the first keys.
        key = torch.arange(self.first_key, self.first_key + self.keys, device=device)[None, :]
        visible = (key <= query)[None, None]
        if self.window is not None:
            visible = visible & (key > query - self.window)
        if self.packed is not None:
            ids = self.packed.sequence_ids
            visible = visible & (ids[:, None, :, None] == ids[:, None, None, :])
        if self.padding_mask is not None:
            unpadded = (
                self.padding_mask[:, self.first_key : self.first_key + self.keys].to(device).bool()
            )
            # A cache of fixed length has more keys than there are tokens; causality hides them.
            unpadded = torch.nn.functional.pad(
                unpadded, (0, self.keys - unpadded.shape[1]), value=True
            )
            visible = visible & unpadded[:, None, None, :]
        return visible

    def _visible_bidirectional(self, device: torch.device) -> Tensor:
        assert self.window is None and self.packed is None and self.queries == self.keys
        if self.padding_mask is None:
            return torch.ones(1, 1, 1, self.keys, dtype=torch.bool, device=device)
        return self.padding_mask.to(device).bool()[:, None, None, :]


@dataclass(frozen=True)
class ForwardInputs:
    """The inputs of a forward other than tokens.

    Attributes:
        padding_mask: [b, all tokens so far], 1 for a token, 0 for padding; None without padding.
        positions: [b or 1, s]; by default those after the cached ones. If frequencies depend on the
            length (`Rotary.by_length`), reading the greatest position synchronises with the device.
        packed: the documents packed in the rows; a token attends to its own.
        cache: keys and values of earlier tokens; gets the present ones.
        router_losses: of the routers' logits, such as the load-balancing loss.
        choice_count: counts the experts that tokens choose, for the update of routers' biases.
    """

    padding_mask: Tensor | None = None
    positions: Tensor | None = None
    packed: PackedSequences | None = None
    cache: Cache | None = None
    router_losses: tuple[RouterLoss, ...] = ()
    choice_count: ChoiceCount | None = None

    @property
    def past(self) -> int:
        """Return the number of cached tokens."""
        return int(self.cache.get_seq_length()) if self.cache is not None else 0


@dataclass(frozen=True)
class ForwardContext:
    """What every layer of one forward reads.

    Attributes:
        sequence: between the linear layers a rank has its sequence shard (SP).
        masks: by window, see AttentionCore.build_mask.
        rotations: of this forward's positions, for each rotary part of the spec.
        cache: keys and values of earlier tokens, of this rank's KV heads; `update` adds the present
            ones.
        sequence_ids: number of each token's packed sequence, [b, s]; None: a row is one.
        unpadded: 1 for a token and 0 for padding, [s, b, 1]; None without padding.
        router_losses, choice_count: see ForwardInputs.
        routes: by layer, where the rows of its tokens go under expert parallelism (model/moe.py).
    """

    sequence: bool
    masks: dict[int | None, Mask]
    rotations: Mapping[Rotary, Rotation] = field(default_factory=dict)
    cache: Cache | None = None
    router_losses: tuple[RouterLoss, ...] = ()
    choice_count: ChoiceCount | None = None
    sequence_ids: Tensor | None = None
    unpadded: Tensor | None = None
    routes: dict[nn.Module, Route] = field(default_factory=dict)
