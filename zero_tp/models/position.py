"""Positions. A position class says what is added to the embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Normal, ParameterMaker


class LearnedPosition(nn.Module):
    """A learned vector a position, replicated. Under SP each rank looks up its own positions: partial gradients."""

    def __init__(self, make: ParameterMaker, positions: int, hidden: int, *, init: Normal):
        super().__init__()
        layout = Replicated("partial" if make.topology.sequence else "identical")
        self.weight = make.make("weight", (positions, hidden), layout, init)

    def forward(self, first: int, length: int) -> Tensor:
        """Positions [first, first + length) → [length, 1, h]."""
        positions = torch.arange(first, first + length, device=self.weight.device)
        return F.embedding(positions, self.weight).unsqueeze(1)


POSITIONS = {"learned": LearnedPosition}
