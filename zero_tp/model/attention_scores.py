"""The largest attention score of each head in training, where it exceeds a threshold.

A score is q·k/√d, or has the model's own scale, before the softmax, of a key that the query sees.
Two bounds spare most products:

- the log-sum-exp of a query's scores, which torch's fused kernels keep for their backward. It is at
  most log s above the largest.
- ‖q‖·‖k‖·scale of the longest query and key, one pass over Q and K, for any kernel.

A head with a bound at most the threshold is done. Only the scores of the others are computed, in
slices of fp32: half of a forward's attention again.

s sequence, b batch, a heads, k KV heads, d head size, t TP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.model.attention import AttentionCore
from zero_tp.model.context import VarlenMask
from zero_tp.model.transformer import Transformer

SLICE = 2**22
"""The most scores that are computed at once: 16 MiB."""
SLACK = 1 + 1e-4
"""Bounds are rounded, so they are lifted by more than their error."""


class AttentionScores:
    """Record the largest score of this rank's heads in the steps inside `recording()`.

    A core counts where it runs with a graph: of a layer that backward recomputes only the second
    run, and no evaluation. The host waits for the device once a layer and micro-batch, for the
    bounds.

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
        spec = transformer.spec
        self._scale = spec.attention_scale or spec.head_size**-0.5
        self._is_recording = False
        shape = (spec.layers, heads)
        self.largest = torch.full(shape, -torch.inf, device=device)
        cores = [module for module in transformer.modules() if isinstance(module, AttentionCore)]
        for number, core in enumerate(cores):
            core.register_forward_hook(partial(self._observe, number), with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the scores of the forwards and backwards inside."""
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

    def _observe(
        self,
        number: int,
        _: nn.Module,
        tensors: tuple[Tensor, ...],
        options: dict[str, Any],
        attended: Tensor,
    ) -> None:
        if not self._is_recording or not torch.is_grad_enabled():
            return
        log_sums = log_sum_exps(attended)
        query, key = (tensor.detach() for tensor in tensors[:2])
        mask: Tensor | VarlenMask | None = options["mask"]
        times = query.shape[1] // key.shape[1]
        bound = norm_bounds(query, key, self._scale)
        if log_sums is not None:
            bound = torch.minimum(bound, log_sums)
        # Read on the host, because it decides which products are computed.
        bounds = (bound * SLACK).tolist()
        for kv_head in range(key.shape[1]):
            group = range(kv_head * times, (kv_head + 1) * times)
            heads = [head for head in group if not bounds[head] <= self._threshold]  # nan is not
            if heads:
                scores = largest_scores(query[:, heads], key[:, kv_head], self._scale, mask)
                scores = scores.masked_fill(scores <= self._threshold, -torch.inf)
                row = self.largest[number]
                row[heads] = torch.maximum(row[heads], scores)


def log_sum_exps(attended: Tensor) -> Tensor | None:
    """Return each head's largest log-sum-exp of a query's visible scores, fp32 [heads], from the
    node of the kernel that made `attended` [b, heads, s, d]; None if it keeps none.
    """
    for name in ("_saved_logsumexp", "_saved_log_sumexp"):
        if hasattr(attended.grad_fn, name):
            # [b, heads, s], on CUDA padded, or with a last dimension of 1.
            saved: Tensor = getattr(attended.grad_fn, name)
            return saved.flatten(2)[..., : attended.shape[2]].amax((0, 2))
    return None


def norm_bounds(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return ‖q‖·‖k‖·scale of each head's longest query and key, fp32 [heads].

    Args:
        query: [b, heads, s, d].
        key: [b, a divisor of heads, s, d].
    """
    norms = [
        torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.float32).amax(-1)
        for tensor in (query, key)
    ]
    keys = norms[1].repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (norms[0] * keys).amax(0) * scale


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
