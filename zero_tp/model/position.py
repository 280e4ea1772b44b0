"""Positions: learned vectors for the embedding, or rotations of queries and keys.

s sequence, b batch, d head size, r rotated features per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.model.architectures.spec import Rotary
from zero_tp.parallel.elementwise import ElementwiseOps
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


class _Rotate(torch.autograd.Function):
    """Rotate by the angles; backward rotates by the negative angles, and rounds as autograd
    would.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, cosine: Tensor, sine: Tensor, ops: ElementwiseOps
    ) -> Tensor:
        # A rotation's transpose turns back, so that no query or key is kept. Several operations of
        # autograd gave the same bits in more than twice the time (benchmarks/tried.md).
        ctx.save_for_backward(cosine, sine)
        ctx.ops = ops
        return _rotate_rows(tensor, cosine, sine, ops)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate_rows(gradient, cosine, -sine, ctx.ops), None, None, None


def _rotate_rows(tensor: Tensor, cosine: Tensor, sine: Tensor, ops: ElementwiseOps) -> Tensor:
    """Rotate with one row per position. [b, heads, s, d] → the same shape.

    The result has positions outermost in memory.
    """
    # Rows of `map_rows` are positions, so that a chunk of heads and its angles fit the cache
    # together. A projection's output has positions outermost in memory already.
    by_position = [part.permute(2, 0, 1, 3) for part in (tensor, cosine, sine)]
    rotated: Tensor = ops.map_rows(_rotate, by_position)
    return rotated.permute(1, 2, 0, 3)


def apply_rotary(tensor: Tensor, cos_sin: CosSin, ops: ElementwiseOps) -> Tensor:
    """Rotate the first r features of every head, feature i with feature i + r/2.

    [b, heads, s, d] → the same shape.
    """
    rotated: Tensor = _Rotate.apply(tensor, *cos_sin, ops)
    return rotated
