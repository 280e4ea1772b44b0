"""Positions: learned vectors for the embedding, or rotations of queries and keys.

s sequence, b batch, d head size, r rotated features per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class Rotation(NamedTuple):
    """Cosine and sine of every position's angles, [b or 1, 1, s, r/2], and which features turn
    together (`Rotary.neighbours`, `Rotary.last`).
    """

    cosine: Tensor
    sine: Tensor
    neighbours: bool = False
    last: bool = False


def compute_rotation(
    rotary: Rotary, positions: Tensor, length: int, dtype: torch.dtype
) -> Rotation:
    """Return the rotation of `positions` [b or 1, s], its angles computed in fp32 for every dtype.

    Args:
        length: of the sequence so far, positions that are cached included.
        dtype: of the activations.
    """
    # In bf16, with 8 significant bits, 257 would be 256: later neighbours would share angles.
    frequencies, scale = rotary.frequencies(length, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    tables = (angles.cos() * scale, angles.sin() * scale)
    if rotary.arithmetic != "fp32":
        tables = (tables[0].to(dtype), tables[1].to(dtype))
    if rotary.arithmetic == "rounded_tables":
        tables = (tables[0].float(), tables[1].float())
    return Rotation(*tables, rotary.neighbours, rotary.last)


def _turning(tensor: Tensor, size: int, last: bool) -> tuple[Tensor, Tensor]:
    """Return views of the features that turn, [*, size], and of the others."""
    if last:
        return tensor[..., -size:], tensor[..., :-size]
    return tensor[..., :size], tensor[..., size:]


def _pairs(tensor: Tensor, neighbours: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and second features of the pairs, a half of [*, size] each."""
    if neighbours:
        return tensor[..., 0::2], tensor[..., 1::2]
    first, second = tensor.chunk(2, -1)
    return first, second


def _rotate(tensor: Tensor, cosine: Tensor, sine: Tensor, neighbours: bool, last: bool) -> Tensor:
    # A head of 6 features of which r 4 rotate, with angles θ0 θ1:
    #     halves        x0 cos θ0 - x2 sin θ0,  x1 cos θ1 - x3 sin θ1,
    #                   x2 cos θ0 + x0 sin θ0,  x3 cos θ1 + x1 sin θ1,  x4,  x5
    #     neighbours    x0 cos θ0 - x1 sin θ0,  x1 cos θ0 + x0 sin θ0,
    #                   x2 cos θ1 - x3 sin θ1,  x3 cos θ1 + x2 sin θ1,  x4,  x5
    turning, rest = _turning(tensor, 2 * cosine.shape[-1], last)
    first, second = _pairs(turning, neighbours)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    joined = torch.stack(turned, -1).flatten(-2) if neighbours else torch.cat(turned, -1)
    rotated = joined.to(tensor.dtype)
    if rest.shape[-1] == 0:
        return rotated
    return torch.cat((rest, rotated) if last else (rotated, rest), -1)


@sharing_memory
def _rotate_pairs_(*parts: Tensor) -> None:
    """Rotate in place: parts are the first and second features [n, *, r/2] of the pairs, of one or
    several tensors, and at last cosine and sine.

    A kernel reads and writes each part at the same index, so that it works in place.
    """
    *pairs, cosine, sine = parts
    for first, second in zip(pairs[::2], pairs[1::2], strict=True):
        turned = first * cosine - second * sine
        second.copy_(second * cosine + first * sine)
        first.copy_(turned)


def _rotate_in_place(query: Tensor, key: Tensor, rotation: Rotation, ops: ElementwiseOps) -> None:
    cosine, sine, neighbours, last = rotation
    turning = [_turning(heads, 2 * cosine.shape[-1], last)[0] for heads in (query, key)]
    pairs = [part for heads in turning for part in _pairs(heads, neighbours)]
    ops.map_rows(_rotate_pairs_, _by_position(*pairs, cosine, sine))


def _rotate_back(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, neighbours: bool, last: bool
) -> tuple[Tensor, Tensor]:
    back = Rotation(cosine, -sine, neighbours, last)
    return _rotate(query, *back), _rotate(key, *back)


def _rotate_back_and_join(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    neighbours: bool,
    last: bool,
) -> Tensor:
    """Return Q | K | V of each position, Q and K rotated back.

    [n, b, a, d] each → [n, b, 3·a·d].
    """
    parts = (*_rotate_back(query, key, cosine, sine, neighbours, last), value)
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
        ctx: Any,
        query: Tensor,
        key: Tensor,
        cosine: Tensor,
        sine: Tensor,
        neighbours: bool,
        last: bool,
        ops: ElementwiseOps,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.features = neighbours, last
        ctx.ops = ops
        _rotate_in_place(query, key, Rotation(cosine, sine, neighbours, last), ops)
        return query, key

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor) -> tuple[Tensor | None, ...]:
        rows = _by_position(query, key, *ctx.saved_tensors)
        rotated = ctx.ops.map_rows(_rotate_back, rows, *ctx.features)
        return (*(part.permute(1, 2, 0, 3) for part in rotated), *(None,) * 5)


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
        neighbours: bool,
        last: bool,
        ops: ElementwiseOps,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.features = neighbours, last
        ctx.ops = ops
        query, key, value = (split_heads(part, head_size) for part in product.chunk(3, -1))
        _rotate_in_place(query, key, Rotation(cosine, sine, neighbours, last), ops)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor | None, ...]:
        rows = _by_position(query, key, value, *ctx.saved_tensors)
        product = ctx.ops.map_rows(_rotate_back_and_join, rows, *ctx.features)
        return product, *(None,) * 6


def split_heads(tensor: Tensor, head_size: int) -> Tensor:
    """Return a view: [s, b, heads · d] → [b, heads, s, d]."""
    return tensor.unflatten(-1, (-1, head_size)).permute(1, 2, 0, 3)


def apply_rotary(
    query: Tensor, key: Tensor, rotation: Rotation, ops: ElementwiseOps
) -> tuple[Tensor, Tensor]:
    """Rotate r features of every head in place.

    [b, heads, s, d] → the same tensors. No backward may need them unrotated: a linear layer's and
    a norm's keep their inputs only.
    """
    rotated: tuple[Tensor, Tensor] = _Rotate.apply(query, key, *rotation, ops)
    return rotated


def apply_rotary_to_product(
    product: Tensor, head_size: int, rotation: Rotation, ops: ElementwiseOps
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of a product Q | K | V [s, b, 3·a·d], Q and K rotated in its memory."""
    heads: tuple[Tensor, Tensor, Tensor] = _RotateProduct.apply(product, head_size, *rotation, ops)
    return heads
