"""Positions: learned vectors for the embedding, or rotations of queries and keys.

s sequence, b batch, d head size, r rotated features per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.architectures.spec import Rotary
from zero_tp.parallel.elementwise import ElementwiseOps, sharing_memory
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Normal, ParameterMaker


class LearnedEmbedding(nn.Module):
    """One vector per position or token type. Under SP each rank looks up its own tokens, so
    gradients are partial.
    """

    def __init__(self, make: ParameterMaker, count: int, hidden: int, *, init: Normal):
        super().__init__()
        # Under SP a rank's tokens use their own rows only; `GradientHooks` sums them over TP.
        layout = Replicated("partial" if make.topology.sequence else "identical")
        self.weight = make.parameter("weight", (count, hidden), layout, init)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up the vectors. [s, b or 1] → [s, b or 1, h]."""
        return F.embedding(indices, self.weight)


CosSin = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, [b or 1, 1, s, r]."""


def compute_cos_sin(rotary: Rotary, positions: Tensor, length: int, dtype: torch.dtype) -> CosSin:
    """Return cosine and sine for `positions` [b or 1, s], computed in fp32 for every dtype.

    Args:
        length: of the sequence so far, positions that are cached included.
        dtype: of the activations.
    """
    # In bf16, with 8 significant bits, 257 would be 256: later neighbours would share angles.
    frequencies, scale = rotary.frequencies(length, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    # Feature i and feature i + r/2 turn by the same angle, in the order of transformers' models.
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def _rotate(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    # A head of 6 features of which r 4 rotate, with angles θ0 θ1 θ0 θ1:
    #     x0 cos θ0 - x2 sin θ0,  x1 cos θ1 - x3 sin θ1,
    #     x2 cos θ0 + x0 sin θ0,  x3 cos θ1 + x1 sin θ1,  x4,  x5
    rotary_part = tensor[..., : cosine.shape[-1]]
    other_part = tensor[..., cosine.shape[-1] :]
    first, second = rotary_part.chunk(2, -1)
    rotated = rotary_part * cosine + torch.cat((-second, first), -1) * sine
    return rotated if other_part.shape[-1] == 0 else torch.cat((rotated, other_part), -1)


@sharing_memory
def _rotate_halves_(*parts: Tensor) -> None:
    """Rotate in place: parts are the first and second halves [n, *, r/2] of rotary features, of
    one or several tensors, and at last cosine and sine of the first half.

    A kernel reads and writes each half at the same index, so that it works in place.
    """
    *halves, cosine, sine = parts
    for first, second in zip(halves[::2], halves[1::2], strict=True):
        turned = first * cosine - second * sine
        second.copy_(second * cosine + first * sine)
        first.copy_(turned)


def _rotate_in_place(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, ops: ElementwiseOps
) -> None:
    size = cosine.shape[-1] // 2
    halves = [half for heads in (query, key) for half in heads[..., : 2 * size].chunk(2, -1)]
    ops.map_rows(_rotate_halves_, _by_position(*halves, cosine[..., :size], sine[..., :size]))


def _rotate_back(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    return _rotate(query, cosine, -sine), _rotate(key, cosine, -sine)


def _rotate_back_and_join(
    query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor
) -> Tensor:
    """Return Q | K | V of each position, Q and K rotated back.

    [n, b, a, d] each → [n, b, 3·a·d].
    """
    parts = (*_rotate_back(query, key, cosine, sine), value)
    return torch.cat([part.flatten(2) for part in parts], -1)


def _by_position(*tensors: Tensor) -> list[Tensor]:
    """Return views with one row per position, as a projection's output has them in memory.

    [b, heads, s, d] → [s, b, heads, d]. A chunk of heads and its angles fit the cache together.
    """
    return [tensor.permute(2, 0, 1, 3) for tensor in tensors]


class _Rotate(torch.autograd.Function):
    """Rotate queries and keys in place; backward rotates by the negative angles, and rounds as
    autograd would.

    A rotation's transpose turns back, so that no query or key is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, ops: ElementwiseOps
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.ops = ops
        _rotate_in_place(query, key, cosine, sine, ops)
        return query, key

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        rows = _by_position(query, key, *ctx.saved_tensors)
        gradients = (part.permute(1, 2, 0, 3) for part in ctx.ops.map_rows(_rotate_back, rows))
        return (*gradients, None, None, None)


class _RotateProduct(torch.autograd.Function):
    """Rotate Q and K in place in a product Q | K | V, and return the heads of all three.

    [s, b, 3·a·d] → [b, a, s, d] each. Backward makes the product's gradient in one pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        product: Tensor,
        head_size: int,
        cosine: Tensor,
        sine: Tensor,
        ops: ElementwiseOps,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.ops = ops
        query, key, value = (split_heads(part, head_size) for part in product.chunk(3, -1))
        _rotate_in_place(query, key, cosine, sine, ops)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        rows = _by_position(query, key, value, *ctx.saved_tensors)
        return ctx.ops.map_rows(_rotate_back_and_join, rows), None, None, None, None


def split_heads(tensor: Tensor, head_size: int) -> Tensor:
    """Return a view: [s, b, heads · d] → [b, heads, s, d]."""
    return tensor.unflatten(-1, (-1, head_size)).permute(1, 2, 0, 3)


def apply_rotary(
    query: Tensor, key: Tensor, cos_sin: CosSin, ops: ElementwiseOps
) -> tuple[Tensor, Tensor]:
    """Rotate the first r features of every head in place, feature i with feature i + r/2.

    [b, heads, s, d] → the same tensors. No backward may need them unrotated: a linear layer's and
    a norm's keep their inputs only.
    """
    rotated: tuple[Tensor, Tensor] = _Rotate.apply(query, key, *cos_sin, ops)
    return rotated


def apply_rotary_to_product(
    product: Tensor, head_size: int, cos_sin: CosSin, ops: ElementwiseOps
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of a product Q | K | V [s, b, 3·a·d], Q and K rotated in its memory."""
    heads: tuple[Tensor, Tensor, Tensor] = _RotateProduct.apply(product, head_size, *cos_sin, ops)
    return heads
