"""The context of a forward is what its layers share: masks, rotation, cache, and whether it runs on sequence shards.

s queries, k keys, b batch. Keys are the tokens that a cache still holds and the queries themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from zero_tp.models.position import Rotation


@dataclass(frozen=True)
class AttentionMask:
    """A mask says which token sees which: causal, past a cache, within a window, within a document, not padding.

    These are the facts; `seen` makes them a tensor.

    Attributes:
        queries, keys: s and k.
        first_query, first_key: their places in the whole sequence; a cache with a window has dropped the keys before.
        padding: [b, all tokens so far], 1 for a token and 0 for padding; None when nothing is padded.
        documents: [b, s], the number of the document that a token belongs to; None when there is one.
        window: how many tokens a token sees, itself among them; None: all before it.
    """

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    padding: Tensor | None = None
    documents: Tensor | None = None
    window: int | None = None

    @property
    def is_causal_alone(self) -> bool:
        """Return whether each token sees itself and all keys before it, and the keys end with the queries."""
        windowed = self.window is not None and self.first_query + self.queries - self.first_key > self.window
        ends = self.first_key + self.keys == self.first_query + self.queries
        aligned = self.queries in (1, self.keys)
        return self.padding is None and self.documents is None and not windowed and ends and aligned

    def seen(self, device: torch.device) -> Tensor:
        """Return the mask as booleans, [b or 1, 1, s, k].

        A token that sees none at all (padding on the left) sees itself, so that its softmax is defined; nobody reads
        its output.
        """
        query = torch.arange(self.first_query, self.first_query + self.queries, device=device)[:, None]
        key = torch.arange(self.first_key, self.first_key + self.keys, device=device)[None, :]
        seen = (key <= query)[None, None]
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.documents is not None:
            seen = seen & (self.documents[:, None, :, None] == self.documents[:, None, None, :])
        if self.padding is not None:
            kept = self.padding[:, self.first_key : self.first_key + self.keys].to(device).bool()
            # A cache of fixed length has more keys than there are tokens; causality hides them.
            kept = torch.nn.functional.pad(kept, (0, self.keys - kept.shape[1]), value=True)
            seen = seen & kept[:, None, None, :]
        return seen | ((key == query) & ~seen.any(-1, keepdim=True))


@dataclass(frozen=True)
class ForwardContext:
    """The context holds what all layers of one forward share.

    Attributes:
        sequence: between the linear layers a rank holds its sequence shard (SP).
        masks: by window, see AttentionCore.mask.
        rotation: of rotary positions.
        cache: keys and values of the tokens before, of this rank's KV heads; `update` adds the present ones.
    """

    sequence: bool
    masks: dict[int | None, Tensor | None]
    rotation: Rotation | None = None
    cache: Cache | None = None
