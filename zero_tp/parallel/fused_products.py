"""Matrix products fused with their gathers and scatters: torch's "async TP" operators, on CUDA only.

They need a TP group whose devices can access each other's memory. Results equal those of a separate collective and
product up to the order of sums. In 16 bits the bias is added to the rounded product: an error of at most half a unit in
the last place of the product.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.parallel.collectives import Group
from zero_tp.parallel.topology import Topology


def enable_fused_products(topology: Topology, device: torch.device) -> None:
    """Enable fused products in the layers of this topology. Collective over the TP group."""
    import torch.distributed._symmetric_memory as symmetric_memory

    key, remedy = "zero_tp.parallel.fused_products", "set it to false"
    if device.type != "cuda":
        raise UserError(f"{key}: needs CUDA devices, and this run is on {device.type}; {remedy}")
    group = topology.tensor_group
    assert group is not None  # the config requires SP
    try:
        symmetric_memory.rendezvous(symmetric_memory.empty(1, device=device), group)
    except RuntimeError as error:
        raise UserError(
            f"{key}: the devices of a TP group cannot access each other's memory ({error}); {remedy}"
        ) from error
    topology.fused_products = True


def fused_all_gather_matmul(
    shard: Tensor, matrices: Sequence[Tensor], group: Group
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Gather a sequence shard and multiply it. [s/t, b, i], [i, o] each → [s, b, i], and [s, b, o] each."""
    assert group is not None
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(shard, list(matrices), 0, group.group_name)
    return gathered, tuple(products)


def fused_matmul_reduce_scatter(tensor: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """Multiply, sum over the group and keep this rank's piece of dimension 0. [s, b, i], [i, o] → [s/t, b, o]."""
    assert group is not None
    scattered: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(tensor, matrix, "sum", 0, group.group_name)
    return scattered
