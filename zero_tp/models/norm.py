"""Norms. They act on whole activations [s, b, h] or, under SP, on a sequence shard [s/t, b, h].

On a shard each TP rank sees a part of the tokens, so the gradients of weight and bias are summed over TP inside
backward: one all-reduce for both, while the input's gradient is computed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, start_all_reduce
from zero_tp.parallel.layout import Replicated
from zero_tp.parallel.parameter import Constant, ParameterMaker


class _LayerNormOfShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, weight: Tensor, bias: Tensor, epsilon: float, group: Group) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(shard, weight.shape, weight, bias, epsilon)
        ctx.save_for_backward(shard, mean, scale, weight, bias)
        ctx.group = group
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        shard, mean, scale, weight, bias = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def of(*wanted: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.aten.native_layer_norm_backward(
                gradient, shard, weight.shape, mean, scale, weight, bias, list(wanted)
            )

        reducing = None
        if needs_weight or needs_bias:
            _, weight_part, bias_part = of(False, True, True)
            reducing = start_all_reduce(torch.stack((weight_part, bias_part)), ctx.group)
        input_gradient = of(True, False, False)[0] if needs_input else None
        weight_gradient, bias_gradient = reducing.wait() if reducing is not None else (None, None)
        return input_gradient, weight_gradient, bias_gradient, None, None


class LayerNorm(nn.Module):
    """Layer normalisation over h, with weight and bias. [*, h] → [*, h]."""

    def __init__(self, make: ParameterMaker, hidden: int, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.group = make.topology.tensor_group
        self.weight = make.make("weight", (hidden,), Replicated(), Constant(1.0))
        self.bias = make.make("bias", (hidden,), Replicated(), Constant(0.0))

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        """`sequence`: the tensor is this rank's sequence shard."""
        if sequence:
            return _LayerNormOfShard.apply(tensor, self.weight, self.bias, self.epsilon, self.group)
        return F.layer_norm(tensor, self.weight.shape, self.weight, self.bias, self.epsilon)


NORMS = {"layer_norm": LayerNorm}
