"""The largest attention score of each head in training's forwards, where it exceeds a threshold.

A score is q·k/√d before the softmax, of a key that the query sees. ‖q‖·‖k‖/√d of the longest q
and k bounds a head's scores, whatever the kernel, mask or window, and costs one pass over Q and
K. A head whose bound is at most the threshold is done. Only the scores of the others are computed,
in slices of fp32.

s sequence, b batch, a heads, k KV heads, d head size, t TP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.model.context import VarlenMask
from zero_tp.model.transformer import Transformer

SLICE = 2**22
"""The most scores that are computed at once: 16 MiB."""
SLACK = 1 + 1e-4
"""The norms are rounded, so the bound is lifted by more than their error."""


class AttentionScores:
    """Record the largest score of this rank's heads in the forwards inside `recording()`.

    Forwards outside, such as an evaluation or a layer that backward recomputes, do not count. The
    host waits for the device once a layer and micro-batch, for the bounds.

    Args:
        transformer: a causal one.
        device: where its cores compute.

    Attributes:
        largest: of each layer and head, fp32 [layers, a/t]; -inf where no score exceeded the
            threshold.
    """

    def __init__(
        self, transformer: Transformer, threshold: float, heads: int, device: torch.device
    ):
        self._threshold = threshold
        self._scale = transformer.spec.head_size**-0.5
        self._is_recording = False
        shape = (len(transformer.layers), heads)
        self.largest = torch.full(shape, -torch.inf, device=device)
        for number, layer in enumerate(transformer.layers):
            core = layer.attention.core
            assert isinstance(core, nn.Module)
            core.register_forward_pre_hook(partial(self._observe, number), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the scores of the forwards inside."""
        self._is_recording = True
        try:
            yield
        finally:
            self._is_recording = False

    def take(self) -> Tensor:
        """Return `largest`, and start again."""
        largest = self.largest
        self.largest = torch.full_like(largest, -torch.inf)
        return largest

    @torch.no_grad()
    def _observe(
        self, number: int, _: nn.Module, tensors: tuple[Tensor, ...], options: dict[str, Any]
    ) -> None:
        if not self._is_recording:
            return
        query, key = tensors[:2]
        mask: Tensor | VarlenMask | None = options["mask"]
        times = query.shape[1] // key.shape[1]
        # Read on the host, because it decides which products are computed.
        bounds = score_bounds(query, key, self._scale).tolist()
        for kv_head in range(key.shape[1]):
            group = range(kv_head * times, (kv_head + 1) * times)
            heads = [head for head in group if bounds[head] > self._threshold]
            if heads:
                scores = largest_scores(query[:, heads], key[:, kv_head], self._scale, mask)
                scores = scores.masked_fill(scores <= self._threshold, -torch.inf)
                row = self.largest[number]
                row[heads] = torch.maximum(row[heads], scores)


def score_bounds(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return a bound of each head's scores, fp32 [heads].

    Args:
        query: [b, heads, s, d].
        key: [b, a divisor of heads, s, d].
    """
    norms = [
        torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).amax(-1)
        for tensor in (query, key)
    ]
    keys = norms[1].repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (norms[0] * keys).amax(0) * (scale * SLACK)


def largest_scores(
    query: Tensor, key: Tensor, scale: float, mask: Tensor | VarlenMask | None
) -> Tensor:
    """Return the largest visible score of heads with the same keys, fp32 [heads].

    Args:
        query: [b, heads, s, d].
        key: [b, s, d].
        mask: of the core (`AttentionCore.build_mask`); None: causal.
    """
    batch, heads, length, _ = query.shape
    largest = torch.full((heads,), -torch.inf, device=query.device)
    keys = key.float().transpose(1, 2).unsqueeze(1)
    # A slice of queries needs no key after its last one.
    rows = max(1, SLICE // (batch * heads * length))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        scores = query[:, :, first:last].float() @ keys[..., :last]
        hidden = ~visible_keys(mask, first, last, query.device)
        scores.masked_fill_(hidden, -torch.inf)
        largest = torch.maximum(largest, scores.amax((0, 2, 3)))
    return largest * scale


def visible_keys(
    mask: Tensor | VarlenMask | None, first: int, last: int, device: torch.device
) -> Tensor:
    """Return which keys before `last` the queries from `first` on see, [b or 1, 1, last - first,
    last].
    """
    if isinstance(mask, Tensor):
        # 0 for a visible key, else -∞ or the dtype's least number.
        return mask[:, :, first:last, :last] == 0
    queries = torch.arange(first, last, device=device)[:, None]
    keys = torch.arange(last, device=device)[None]
    visible = (keys <= queries)[None, None]
    if mask is None:
        return visible
    if mask.window >= 0:
        visible = visible & (keys >= queries - mask.window)
    ids = mask.packed.sequence_ids
    return visible & (ids[:, None, first:last, None] == ids[:, None, None, :last])
