"""The MLP: first weight split by columns, activation local, second split by rows (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from zero_tp.models.regions import LayerRegions
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker


class MLP(nn.Module):
    """h → 4h → activation → h. [s, b, h] → [s, b, h], sequence shards under SP."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, regions: LayerRegions):
        super().__init__()
        self.activation, self.regions = spec.activation, regions
        self.up = ColumnParallelLinear(
            make.child("up"), spec.hidden, (spec.mlp_size,), bias=spec.bias, init=Normal(spec.init_std)
        )
        self.down = RowParallelLinear(
            make.child("down"), spec.mlp_size, spec.hidden, bias=spec.bias, init=Normal(spec.residual_std)
        )

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        wide = self.up(tensor, sequence=sequence)
        return self.regions.mlp_activation(self.activation, wide, partial(self.down, sequence=sequence))


MLPS = {"mlp": MLP}
