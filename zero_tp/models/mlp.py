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
            make.child("up"), spec.hidden, (spec.mlp_size,), bias=spec.mlp_bias, init=Normal(spec.init_std)
        )
        self.down = RowParallelLinear(
            make.child("down"), spec.mlp_size, spec.hidden, bias=spec.mlp_bias, init=Normal(spec.residual_std)
        )

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        wide = self.up(tensor, sequence=sequence)
        return self.regions.mlp_activation(self.activation, wide, partial(self.down, sequence=sequence))


class GatedMLP(nn.Module):
    """(activation(x Wᵍ) · x Wᵘ) Wᵈ (arXiv 2002.05202, equation 6). [s, b, h] → [s, b, h], sequence shards under SP.

    Gate and up are one weight with two parts.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, regions: LayerRegions):
        super().__init__()
        self.activation, self.regions = spec.activation, regions
        self.gate_up = ColumnParallelLinear(
            make.child("gate_up"),
            spec.hidden,
            (spec.mlp_size, spec.mlp_size),
            bias=spec.mlp_bias,
            init=Normal(spec.init_std),
        )
        self.down = RowParallelLinear(
            make.child("down"), spec.mlp_size, spec.hidden, bias=spec.mlp_bias, init=Normal(spec.residual_std)
        )

    def _gated(self, wide: Tensor) -> Tensor:
        gate, up = wide.chunk(2, -1)
        return self.activation(gate) * up

    def forward(self, tensor: Tensor, *, sequence: bool) -> Tensor:
        wide = self.gate_up(tensor, sequence=sequence)
        return self.regions.mlp_activation(self._gated, wide, partial(self.down, sequence=sequence))


MLPS: dict[str, type[MLP] | type[GatedMLP]] = {"mlp": MLP, "gated": GatedMLP}
