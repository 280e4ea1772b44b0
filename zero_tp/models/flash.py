"""Flash attention on CPUs from matrix products, faster than torch's own kernel (benchmarks/tried.md).

It saves what a flash kernel saves: Q, K, V, the output and the logarithm of each softmax's sum. b batch, a heads,
s sequence, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zero_tp import devices

BLOCK = 128
"""Queries of a block; causal blocks skip later keys. Sequences shorter than two blocks use torch's own kernel."""
BLOCK_ELEMENTS = 2**20
"""Scores that exist at a time; they have to fit a core's cache."""


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        batch, heads, length, size = query.shape
        output = query.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)  # as the output projection reads it
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
        for own, kv_index, repeats in _blocks(query, key):
            keys, values = (tensor[kv_index].repeat_interleave(repeats, 0) for tensor in (key, value))
            _attend(query[own], keys, values, output[own], lse[own], causal=causal)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.causal = causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for own, kv_index, repeats in _blocks(query, key):
            keys, values = (tensor[kv_index].repeat_interleave(repeats, 0) for tensor in (key, value))
            parts = (tensor[own] for tensor in (output, lse, gradient))
            dq[own], *key_and_value = _gradients(query[own], keys, values, *parts, causal=ctx.causal)
            for whole, part in zip((dk, dv), key_and_value, strict=True):
                whole[kv_index] += part.unflatten(0, (-1, repeats)).sum(1)
        return dq, dk, dv, None


def _blocks(query: Tensor, key: Tensor) -> Iterator[tuple[tuple[int, slice], tuple[int, slice], int]]:
    """Yield (row and heads of a block, row and KV heads of the block, heads per KV head)."""
    batch, heads, length, _ = query.shape
    group = heads // key.shape[1]
    most = max(1, BLOCK_ELEMENTS // (min(BLOCK, length) * length))
    repeats = max(size for size in range(1, min(group, most) + 1) if group % size == 0)
    heads_per_block = max(repeats, most // repeats * repeats) if repeats == group else repeats
    for row in range(batch):
        for first in range(0, heads, heads_per_block):
            last = min(first + heads_per_block, heads)
            yield (row, slice(first, last)), (row, slice(first // group, (last - 1) // group + 1)), repeats


def _attend(query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *, causal: bool) -> None:
    """Write softmax(QKᵀ/√d)V, [heads, s, d], to `output` and L = log Σ exp(QKᵀ/√d), fp32 [heads, s], to `lse`."""
    scale = query.shape[-1] ** -0.5
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))  # otherwise each block copies them
    length = query.shape[1]
    hidden = query.new_full((BLOCK, BLOCK), -torch.inf, dtype=torch.float32).triu_(1)
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        own, seen = slice(begin, end), slice(end if causal else length)
        score, rest = _product(query[:, own], key[:, seen], scale)
        exact = score if rest is None else score.float().add_(rest)
        if causal:
            exact[:, :, begin:].add_(hidden[: end - begin, : end - begin])
        share = exact.softmax(-1)
        lse[:, own] = exact.amax(-1) - share.amax(-1).log()
        output[:, own] = torch.bmm(share.to(query.dtype), value[:, seen])


def _gradients(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, gradient: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, K and V, all [heads, s, d], from those of the output.

    With P = exp(QKᵀ/√d - L) and D = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)) they are DK/√d, DᵀQ/√d and PᵀdO ("FlashAttention-2",
    arXiv 2307.08691, algorithm 2). The subtrahend is part of the product, as two more columns of 16-bit numbers that
    sum to it, so the product rounds the difference only. (In fp32 they are one number and a zero.)

    Args:
        logarithms: L, of the sums of the scores' exponentials, fp32 [heads, s].
    """
    scale = query.shape[-1] ** -0.5
    query, key, gradient = (tensor.contiguous() for tensor in (query, key, gradient))
    ones = query.new_ones(*key.shape[:2], 2)
    queries = torch.cat((query, _split_fp32(-lse / scale, query.dtype)), -1)
    outputs = torch.cat((gradient, _split_fp32(-(gradient.float() * output).sum(-1), query.dtype)), -1)
    keys, values = torch.cat((key, ones), -1), torch.cat((value, ones), -1)
    dq = torch.empty_like(query, memory_format=torch.contiguous_format)
    dk, dv = (query.new_zeros(query.shape) for _ in range(2))
    length = query.shape[1]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        own, seen = slice(begin, end), slice(end if causal else length)
        share, rest = _product(queries[:, own], keys[:, seen], scale)
        share.exp_()
        if rest is not None:
            share.addcmul_(share, rest)
        if causal:
            share[:, :, begin:].tril_()
        dv[:, seen].baddbmm_(share.mT, gradient[:, own])
        score = torch.bmm(outputs[:, own], values[:, seen].mT).mul_(share)
        dq[:, own] = _scaled(score, key[:, seen], scale)
        dk[:, seen].baddbmm_(score.mT, query[:, own], alpha=scale)
    return dq, dk, dv


def _product(left: Tensor, right: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return scaled scores, [heads, queries, keys], and the rounding error of 16-bit ones: the product minus them."""
    score = _scaled(left, right.mT, scale)
    if left.dtype == torch.float32:
        return score, None
    return score, torch.baddbmm(score, left, right.mT, beta=-1, alpha=scale)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _split_fp32(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 numbers as two columns of a narrower dtype whose sum they are."""
    high = numbers.to(dtype)
    return torch.stack((high, (numbers - high).to(dtype)), -1)


def is_faster(dtype: torch.dtype, device: torch.device, queries: int, keys: int) -> bool:
    """Return whether attention here is faster than torch's kernel."""
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and devices.multiplies_bf16())
    return device.type == "cpu" and fast and queries == keys >= 2 * BLOCK


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Return softmax(QKᵀ/√d)V of CPU tensors, [b, a, s, d]. It can be differentiated once.

    Args:
        query: [b, a, s, d].
        key: [b, a or a divisor of it, s, d]: each of its heads serves as many of Q's in turn.
        value: as key.
    """
    output: Tensor = _Flash.apply(query, key, value, causal)
    return output
