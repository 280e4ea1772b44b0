"""Flash attention for CPUs, built from matrix products; faster than torch's own kernel
(benchmarks/tried.md).

Like a flash kernel it saves Q, K, V, the output and the logarithm of each softmax's sum.

b batch, a heads, k KV heads, s sequence, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zero_tp.parallel import devices

BLOCK = 128
"""Queries per block; causal blocks skip later keys. Sequences shorter than two blocks use
torch's own kernel.
"""
BLOCK_ELEMENTS = 2**20
"""Scores in memory at a time; they must fit a core's cache."""


class _Flash(torch.autograd.Function):
    """Attention whose backward computes the probabilities again, from Q, K and L.

    Kept are Q, K, V, the output and L, one number a query, instead of s² probabilities a head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        batch, heads, length, size = query.shape
        # As the output projection reads it.
        output = query.new_empty(length, batch, heads, size).permute(1, 2, 0, 3)
        lse = query.new_empty(batch, heads, length, dtype=torch.float32)
        # A few heads at a time, so that their scores stay in the cache between softmax and product.
        for index, kv_index, repeats in _head_blocks(query, key):
            keys, values = (
                tensor[kv_index].repeat_interleave(repeats, 0) for tensor in (key, value)
            )
            _attend(query[index], keys, values, output[index], lse[index], causal=causal)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.causal = causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, lse = ctx.saved_tensors
        dq = torch.empty_like(query)
        dk = torch.zeros_like(key)
        dv = torch.zeros_like(value)
        for index, kv_index, repeats in _head_blocks(query, key):
            keys, values = (
                tensor[kv_index].repeat_interleave(repeats, 0) for tensor in (key, value)
            )
            parts = (tensor[index] for tensor in (output, lse, gradient))
            dq[index], *key_and_value = _gradients(
                query[index], keys, values, *parts, causal=ctx.causal
            )
            # Several blocks may serve the same KV head, and each adds the sum over its queries.
            for whole, part in zip((dk, dv), key_and_value, strict=True):
                whole[kv_index] += part.unflatten(0, (-1, repeats)).sum(1)
        return dq, dk, dv, None


def _head_blocks(
    query: Tensor, key: Tensor
) -> Iterator[tuple[tuple[int, slice], tuple[int, slice], int]]:
    """Yield the heads that are computed together, so many that their scores fit the cache.

    Each is (index of some heads of one row, index of their KV heads, repetitions of a KV head).
    """
    batch, heads, length, _ = query.shape
    group = heads // key.shape[1]
    # 8 heads in groups of 4 become blocks of so many heads that their scores fit the cache:
    #     max_heads 8    (q0 … q7; k0 k1)                           each KV head repeated 4 times
    #     max_heads 6    (q0 … q3; k0) (q4 … q7; k1)                4 times
    #     max_heads 3    (q0 q1; k0) (q2 q3; k0) (q4 q5; k1) …      2 times
    max_heads = max(1, BLOCK_ELEMENTS // (min(BLOCK, length) * length))
    repeats = max(size for size in range(1, min(group, max_heads) + 1) if group % size == 0)
    heads_per_block = max(repeats, max_heads // repeats * repeats) if repeats == group else repeats
    for row in range(batch):
        for first in range(0, heads, heads_per_block):
            last = min(first + heads_per_block, heads)
            yield (
                (row, slice(first, last)),
                (row, slice(first // group, (last - 1) // group + 1)),
                repeats,
            )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *, causal: bool
) -> None:
    """Compute attention of some heads, and the logarithm of each softmax's sum.

    Args:
        query, key, value: [heads, s, d].
        output: gets softmax(QKᵀ/√d)V, [heads, s, d].
        lse: gets L = log Σ exp(QKᵀ/√d), fp32 [heads, s].
    """
    scale = query.shape[-1] ** -0.5
    # Products of strided Q, K and V were 5 ms slower than those of copies (benchmarks/tried.md).
    # Otherwise each block copies them.
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    length = query.shape[1]
    # Later keys are not multiplied at all, so only the block on the diagonal needs a mask.
    causal_bias = query.new_full((BLOCK, BLOCK), -torch.inf, dtype=torch.float32).triu_(1)
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        rows = slice(begin, end)
        visible = slice(end if causal else length)
        # One bf16 product would round the exponent to 2^-9 of itself. With the remainder the output
        # is off by 0.22 % of its norm, where torch's kernel is off by 0.20 % (benchmarks/tried.md).
        score, remainder = _product(query[:, rows], key[:, visible], scale)
        scores = score if remainder is None else score.float().add_(remainder)
        if causal:
            scores[:, :, begin:].add_(causal_bias[: end - begin, : end - begin])
        probabilities = scores.softmax(-1)
        # The largest probability is exp(largest score - L), so L needs no second sum of
        # exponentials.
        lse[:, rows] = scores.amax(-1) - probabilities.amax(-1).log()
        output[:, rows] = torch.bmm(probabilities.to(query.dtype), value[:, visible])


def _gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    gradient: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of Q, K and V, all [heads, s, d], from those of the output.

    With P = exp(QKᵀ/√d - L) and D = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O)) they are DK/√d, DᵀQ/√d and PᵀdO
    ("FlashAttention-2", arXiv 2307.08691, algorithm 2). Both subtrahends, L and the rowsum, enter
    the matrix products as two extra columns that sum to them. So only the difference is rounded to
    16 bits. (In fp32 the second column is 0.)

    Args:
        lse: L, the logarithm of the sum of each query's exponentials, fp32 [heads, s].
    """
    scale = query.shape[-1] ** -0.5
    query, key, gradient = (tensor.contiguous() for tensor in (query, key, gradient))
    ones = query.new_ones(*key.shape[:2], 2)
    query_lse = torch.cat((query, _split_fp32(-lse / scale, query.dtype)), -1)
    gradient_delta = torch.cat(
        (gradient, _split_fp32(-(gradient.float() * output).sum(-1), query.dtype)), -1
    )
    key_ones = torch.cat((key, ones), -1)
    value_ones = torch.cat((value, ones), -1)
    dq = torch.empty_like(query, memory_format=torch.contiguous_format)
    dk, dv = (query.new_zeros(query.shape) for _ in range(2))
    length = query.shape[1]
    for begin in range(0, length, BLOCK):
        end = min(begin + BLOCK, length)
        rows = slice(begin, end)
        visible = slice(end if causal else length)
        # The product of the extra columns is -L/scale, so these are the exponents of P.
        probabilities, remainder = _product(query_lse[:, rows], key_ones[:, visible], scale)
        probabilities.exp_()
        if remainder is not None:
            # exp(x + r) = exp(x) · (1 + r) up to r², and r is what rounding x to 16 bits has lost.
            probabilities.addcmul_(probabilities, remainder)
        if causal:
            # After the exponential, so that no -∞ is needed: hidden keys have probability 0.
            probabilities[:, :, begin:].tril_()
        dv[:, visible].baddbmm_(probabilities.mT, gradient[:, rows])
        # D of the docstring. The extra columns have subtracted rowsum(dO ⊙ O) inside the product.
        score = torch.bmm(gradient_delta[:, rows], value_ones[:, visible].mT).mul_(probabilities)
        dq[:, rows] = _scaled(score, key[:, visible], scale)
        dk[:, visible].baddbmm_(score.mT, query[:, rows], alpha=scale)
    return dq, dk, dv


def _product(left: Tensor, right: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return scaled scores, [heads, queries, keys], and what their rounding lost (None in fp32)."""
    score = _scaled(left, right.mT, scale)
    if left.dtype == torch.float32:
        return score, None
    # The product adds in fp32 and rounds last: minus the rounded product it gives what that rounded
    # off.
    return score, torch.baddbmm(score, left, right.mT, beta=-1, alpha=scale)


def _scaled(left: Tensor, right: Tensor, scale: float) -> Tensor:
    # With beta 0 torch does not read the first argument, so its value, even NaN, has no effect.
    return torch.baddbmm(left.new_empty(()), left, right, beta=0, alpha=scale)


def _split_fp32(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Split fp32 numbers into two columns of a narrower dtype, which sum to them."""
    # A row sum rounded to 8 bits would shift all exponents of its row.
    high = numbers.to(dtype)
    return torch.stack((high, (numbers - high).to(dtype)), -1)


def is_faster(dtype: torch.dtype, device: torch.device, queries: int, keys: int) -> bool:
    """Return whether `flash_attention` is faster than torch's kernel."""
    # bf16 products pay where the CPU has instructions for them. Shorter sequences, and single
    # queries after a cache, use torch's kernel.
    fast = dtype == torch.float32 or (dtype == torch.bfloat16 and devices.multiplies_bf16())
    return device.type == "cpu" and fast and queries == keys >= 2 * BLOCK


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Return softmax(QKᵀ/√d)V of CPU tensors, [b, a, s, d]. It can be differentiated once.

    Args:
        query: [b, a, s, d].
        key: [b, k, s, d], where k divides a: each KV head serves a/k consecutive query heads.
        value: as key.
    """
    output: Tensor = _Flash.apply(query, key, value, causal)
    return output
