"""For tests of ranks: comparisons in norm, and weights that are sharded from whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.pool_rank import cached
from zero_tp.engine.zero.expert_groups import is_divided
from zero_tp.model.weights.entries import gather_shards
from zero_tp.parallel.collectives import Group
from zero_tp.parallel.layout import Layout, layout_of
from zero_tp.parallel.parameter import Init, ParameterMaker
from zero_tp.parallel.topology import Topology

RELATIVE, OF_GLOBAL = 1e-5, 1e-7


def norm(*tensors: Tensor) -> float:
    """Taken in float64: torch's fp32 norm on CPU is inexact at 1e-4."""
    return sum(float(tensor.detach().double().norm()) ** 2 for tensor in tensors) ** 0.5


def tolerances(reference: Mapping[str, Tensor], relative: float = RELATIVE) -> dict[str, float]:
    """The ‖Δ‖ that is allowed for each name: relative·‖reference‖ + 1e-7·(norm of all
    references).
    """
    whole = norm(*reference.values())
    return {name: relative * norm(tensor) + OF_GLOBAL * whole for name, tensor in reference.items()}


def check_close(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor], *, relative: float = RELATIVE
) -> None:
    """‖Δ‖ is within `tolerances` for every name, with the same shape."""
    assert found.keys() == reference.keys()
    for name, allowed in tolerances(reference, relative).items():
        actual, expected = found[name], reference[name]
        assert actual.shape == expected.shape, (
            f"{name}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
        )
        difference = norm(actual.double() - expected.double())
        assert difference <= allowed, (
            f"{name}: ‖Δ‖ {difference:.3g} > {allowed:.3g} (‖reference‖ {norm(expected):.3g})"
        )


@dataclass(frozen=True)
class WholeWeights:
    """A WeightSource of whole tensors by name."""

    tensors: Mapping[str, Tensor]

    def fill(
        self,
        local: Tensor,
        name: str,
        whole: Sequence[int],
        layout: Layout,
        init: Init,
        topology: Topology,
    ) -> None:
        assert self.tensors[name].shape == torch.Size(whole)
        local.copy_(
            layout.shard(
                self.tensors[name], topology.tensor_rank, topology.tensor, topology.expert_rank
            )
        )


def grid(tensor: int, sequence: bool, expert: int = 1) -> Topology:
    """Return a topology of this rank, built once in a pool."""
    key = "topology", tensor, sequence, expert
    return cached(key, lambda: Topology(tensor, sequence, expert=expert))


def maker(
    topology: Topology, dtype: torch.dtype = torch.float32, **tensors: Tensor
) -> ParameterMaker:
    return ParameterMaker(topology, WholeWeights(tensors), dtype)


def piece_of(whole: Tensor, topology: Topology) -> Tensor:
    """A rank's part of an activation [s, …]: its sequence shard under SP, else all."""
    return whole.chunk(topology.tensor)[topology.tensor_rank] if topology.sequence else whole


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def unshard(local: Tensor, parameter: nn.Parameter, topology: Topology) -> Tensor:
    """Reassemble a tensor from every rank's shard by the parameter's layout; collective."""
    return gather_shards(local, layout_of(parameter), topology)


def partition_group(parameter: Tensor, topology: Topology) -> Group:
    """Return the ranks that have the same elements of a parameter."""
    return topology.expert_data_group if is_divided(parameter) else topology.data_group


def whole_gradient(parameter: nn.Parameter, topology: Topology) -> Tensor:
    return unshard(gradient_of(parameter), parameter, topology)


def whole_gradients(model: Any) -> dict[str, Tensor]:
    """Of every parameter of a ZeroTPForCausalLM; collective over its TP group."""
    topology = model.topology
    return {
        name: whole_gradient(parameter, topology) for name, parameter in model.named_parameters()
    }
