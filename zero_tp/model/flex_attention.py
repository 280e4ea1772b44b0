"""Attention whose scores are capped or have sinks, by torch's `flex_attention`: no kernel of SDPA
has them.

torch compiles a kernel with the cap in it. It keeps no scores, and skips blocks that a window or
documents hide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.context import AttentionMask
from zero_tp.parallel import devices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_first_shape: list[tuple[int, int]] = []
"""(batch, length) of the first forward that could use a kernel; of at most one."""


def can_use_flex(
    mask: AttentionMask, spec: TransformerSpec, batch: int, device: torch.device
) -> bool:
    """Return whether `flex_attention` computes this forward: of the first shape of the process,
    which is training's.

    Another shape would compile another kernel, and after eight torch would compute all scores
    without a word (2.13). A token of padding that sees no key outputs 0 there, and the mean of all
    values in transformers' classes with caps.
    """
    if not (
        devices.runs_flash(device)
        and spec.fits_flex
        and mask.padding_mask is None
        # Blocks are numbered from the first token; a cache has other keys than queries.
        and (mask.first_key, mask.keys) == (mask.first_query, mask.queries)
    ):
        return False
    if not _first_shape:
        _first_shape.append((batch, mask.queries))
    return _first_shape[0] == (batch, mask.queries)


def build_block_mask(mask: AttentionMask, device: torch.device) -> BlockMask:
    """Return which blocks of 128 queries and 128 keys are computed, and the mask within them."""
    if mask.packed is not None:
        return _block_mask(mask, device)
    # The same for each batch of a run.
    return _cached_block_mask(mask.queries, mask.window, device)


@functools.lru_cache(maxsize=16)
def _cached_block_mask(length: int, window: int | None, device: torch.device) -> BlockMask:
    return _block_mask(AttentionMask(length, length, window=window), device)


def _block_mask(mask: AttentionMask, device: torch.device) -> BlockMask:
    from torch.nn.attention import flex_attention  # importing it takes seconds

    ids = None if mask.packed is None else mask.packed.sequence_ids
    window = mask.keys if mask.window is None else mask.window

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key <= query) & (key > query - window)
        return visible if ids is None else visible & (ids[row, query] == ids[row, key])

    batch = None if mask.packed is None else mask.packed.batch
    make: Any = flex_attention.create_block_mask
    if device.type == "cuda":
        # Otherwise it makes the mask of all tokens, s² of each row, on the way.
        make = torch.compile(make)
    block_mask: BlockMask = make(is_visible, batch, None, mask.queries, mask.keys, device)
    return block_mask


def capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, cap: float, scale: float
) -> Tensor:
    """Return softmax(cap · tanh(scale · QKᵀ / cap))V. Shapes as in AttentionCore.

    Args:
        mask: of `build_block_mask`.
    """
    attended: Tensor = _kernel(query.device.type)(
        query,
        key,
        value,
        score_mod=_cap_of(cap),
        block_mask=mask,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return attended


def sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Any, scale: float
) -> Tensor:
    """Return softmax(scale · QKᵀ)V whose softmax has a score more for each head, `sinks` [heads].
    Shapes as in AttentionCore.

    With L the log-sum-exp of a query's scores, its output is multiplied by e^L / (e^L + e^sink).

    Args:
        mask: of `build_block_mask`.
    """
    attended, log_sums = attention_with_log_sums(query, key, value, mask, scale)
    share = torch.sigmoid(log_sums - sinks.float().unsqueeze(-1))
    return attended * share.unsqueeze(-1).to(attended.dtype)


def attention_with_log_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale · QKᵀ)V, and the log-sum-exp of each query's scores, fp32 [b, heads,
    s].
    """
    from torch.nn.attention.flex_attention import AuxRequest

    attended, extra = _kernel(query.device.type)(
        query,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return attended, extra.lse


@functools.cache
def _kernel(device_type: str) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Without a compiler it computes and keeps all scores.
    kernel: Any = flex_attention
    return torch.compile(kernel, dynamic=False) if device_type == "cuda" else kernel


@functools.cache
def _cap_of(cap: float) -> Callable[..., Tensor]:
    """Return the function of a score. One for each cap: another one would be compiled again."""

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
