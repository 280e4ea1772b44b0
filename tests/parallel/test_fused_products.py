"""Fused products on CPU ranks, by torch's reference implementations: the operators have only CUDA kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from tests.support.compare import grid, maker, piece_of
from tests.support.gpt2_reference import SIZES, same_as_native
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.base.errors import UserError
from zero_tp.parallel.fused_products import enable_fused_products
from zero_tp.parallel.linear import ColumnParallelLinear
from zero_tp.parallel.parameter import Normal
from zero_tp.parallel.topology import Topology

REFERENCES = {
    "fused_all_gather_matmul": symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": symmetric_memory._fused_matmul_reduce_scatter_fallback,
}


@contextmanager
def on_cpu(topology: Topology) -> Iterator[list[str]]:
    """Give this topology's layers the references; the list gets each call."""
    calls: list[str] = []
    library = torch.library.Library("symm_mem", "IMPL")
    for name, reference in REFERENCES.items():

        def called(*args: Any, name: str = name, reference: Any = reference, **options: Any) -> Any:
            calls.append(name)
            return reference(*args, **options)

        library.impl(name, called, "CPU")
    try:
        with patch.object(topology, "fused_products", True):
            yield calls
    finally:
        library._destroy()


def same_as_native_fused(world: int) -> list[int]:
    """Compare a model; return how many gathers and scatters were fused."""
    with on_cpu(grid(world, True)) as calls:
        same_as_native(world, True, "right", {})
    return [calls.count(name) for name in REFERENCES]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=THOROUGH)])
def test_loss_logits_and_every_gradient(ranks: Pools, world: int) -> None:
    """Count: a layer fuses two gathers and two scatters in each of three forwards and in its backward."""
    each = (3 * 2 + 2) * SIZES["n_layer"]
    assert ranks(world).run(same_as_native_fused, world) == [[each, each]] * world


def outputs_in_bf16() -> tuple[Tensor, Tensor, Tensor]:
    """Return a bf16 layer's output: fused, computed with its two roundings, and with a separate gather."""
    topology = grid(2, True)
    torch.manual_seed(3)
    weight, bias, whole = (torch.randn(*size).bfloat16() for size in ((28, 10), (28,), (8, 3, 10)))
    layer = ColumnParallelLinear(
        maker(topology, torch.bfloat16, weight=weight, bias=bias), 10, (28,), bias=True, init=Normal(1.0)
    )
    plain = layer(piece_of(whole, topology), sequence=True).detach()
    with on_cpu(topology):
        found = layer(piece_of(whole, topology), sequence=True).detach()
    rows = slice(topology.tensor_rank * 14, (topology.tensor_rank + 1) * 14)
    return found, (whole.float() @ weight[rows].float().t()).bfloat16() + bias[rows], plain


def test_a_16_bit_bias_is_added_to_the_rounded_product(ranks: Pools) -> None:
    for found, twice, plain in ranks(2).run(outputs_in_bf16):
        assert torch.equal(found, twice)
        assert 0 < (found - plain).abs().max() <= 2.0**-7 * 8  # one unit in the last place of numbers below 16


def refused_on_cpu() -> str:
    with pytest.raises(UserError) as raised:
        enable_fused_products(grid(2, True), torch.device("cpu"))
    assert not grid(2, True).fused_products
    return str(raised.value)


def test_other_devices_are_refused(ranks: Pools) -> None:
    line = "zero_tp.parallel.fused_products: needs CUDA devices, and this run is on cpu; set it to false"
    assert ranks(2).run(refused_on_cpu) == [line] * 2
