"""Positions are added to the embedding, or turn queries and keys.

s sequence, b batch, d head size, r features of a head that turn.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.models.spec import Rotary
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Normal, ParameterMaker


class LearnedPosition(nn.Module):
    """A vector is learned for each position. Under SP each rank looks up its own positions: partial gradients."""

    def __init__(self, make: ParameterMaker, positions: int, hidden: int, *, init: Normal):
        super().__init__()
        layout = Replicated("partial" if make.topology.sequence else "identical")
        self.weight = make.make("weight", (positions, hidden), layout, init)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up the vectors. [s, b or 1] → [s, b or 1, h]."""
        return F.embedding(positions, self.weight)


POSITIONS: dict[str, type[LearnedPosition] | None] = {"learned": LearnedPosition, "rotary": None}
"""What is added to the word embedding; rotary positions add nothing."""

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, [b or 1, 1, s, r]."""


def rotation(rotary: Rotary, positions: Tensor, length: int, dtype: torch.dtype) -> Rotation:
    """Return cosine and sine for `positions` [b or 1, s], computed in fp32 whatever the model's dtype.

    Args:
        length: of the sequence so far, positions that are cached included.
        dtype: of the activations.
    """
    frequencies, scale = rotary.frequencies(length, positions.device)
    angles = positions[:, None, :, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(tensor: Tensor, by: Rotation) -> Tensor:
    """Turn the first r features of every head: feature i with feature i + r/2. [b, heads, s, d] → the same shape."""
    cosine, sine = by
    turning, staying = tensor[..., : cosine.shape[-1]], tensor[..., cosine.shape[-1] :]
    first, second = turning.chunk(2, -1)
    turned = turning * cosine + torch.cat((-second, first), -1) * sine
    return turned if staying.shape[-1] == 0 else torch.cat((turned, staying), -1)
