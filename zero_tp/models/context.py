"""The context of a forward: masks, rotation, cache, and whether it runs on sequence shards."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.cache_utils import Cache

from zero_tp.models.position import Rotation


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
