"""Norms. They act on whole [s, b, h] or on a sequence shard [s/t, b, h]; then their gradients are partial."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Constant, ParameterMaker


class LayerNorm(nn.Module):
    """Layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, hidden: int, epsilon: float):
        super().__init__()
        layout = Replicated("partial" if make.topology.sequence else "identical")
        self.epsilon = epsilon
        self.weight = make.make("weight", (hidden,), layout, Constant(1.0))
        self.bias = make.make("bias", (hidden,), layout, Constant(0.0))

    def forward(self, tensor: Tensor) -> Tensor:
        return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.epsilon)


NORMS = {"layer_norm": LayerNorm}
