"""The elementwise work of experts' rows in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.allocations import largest_allocation
from tests.support.compare import leaf, maker
from zero_tp.parallel import elementwise
from zero_tp.parallel.expert_exchange import LocalExperts
from zero_tp.parallel.grouped_linear import (
    ColumnParallelGroupedLinear,
    Routing,
    RowParallelGroupedLinear,
)
from zero_tp.parallel.layout import Sharded
from zero_tp.parallel.parameter import Normal
from zero_tp.parallel.topology import Topology

EXPERTS, CHOSEN, TOKENS, HIDDEN, WIDTH = 5, 3, 64, 48, 40


def results(inputs: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """Return output and gradients of two grouped layers of fixed weights, and the largest
    allocation of their backward.
    """
    tokens, weights, chosen = inputs
    shapes: dict[str, tuple[int, ...]] = {
        "up.weight": (EXPERTS, WIDTH, HIDDEN),
        "down.weight": (EXPERTS, HIDDEN, WIDTH),
        "down.bias": (EXPERTS, HIDDEN),
    }
    generator = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    make = maker(Topology(world=1), dtype, **whole)
    columns, lines, init = Sharded(1, (WIDTH,)), Sharded(2, (WIDTH,)), Normal(1.0)
    up = ColumnParallelGroupedLinear(make.child("up"), EXPERTS, HIDDEN, WIDTH, columns, init)
    down = RowParallelGroupedLinear(
        make.child("down"), EXPERTS, WIDTH, HIDDEN, lines, init, bias=True
    )
    routing = Routing.from_groups(chosen, EXPERTS)
    experts = LocalExperts(routing.ends)
    given, routing_weights = leaf(tokens.to(dtype)), leaf(weights)
    rows = up(given, routing, experts, sequence=False)
    output = down(rows, routing_weights, routing, experts)
    largest = largest_allocation(partial(output.backward, torch.ones_like(output)))
    parameters = [*up.parameters(), *down.parameters()]
    gradients = [each.grad for each in (given, routing_weights, *parameters)]
    assert all(each is not None for each in gradients)
    return [output.detach(), *(each for each in gradients if each is not None)], largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_give_the_same_bits(
    dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in 16 bits no fp32 copy of all rows."""
    generator = torch.Generator().manual_seed(seed)
    inputs = (
        torch.randn(TOKENS, 1, HIDDEN, generator=generator),
        torch.rand(TOKENS, CHOSEN, generator=generator),
        torch.randint(EXPERTS, (TOKENS, CHOSEN), generator=generator),
    )
    expected, largest_of_all = results(inputs, dtype)
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", 7 * HIDDEN)
    found, largest = results(inputs, dtype)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    copy = 4 * TOKENS * CHOSEN * WIDTH
    assert dtype == torch.float32 or largest < copy <= largest_of_all
