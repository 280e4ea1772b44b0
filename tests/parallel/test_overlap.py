"""Collectives of column and row layers overlap with GEMMs; a column layer saves only its input
shard.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.compare import grid, leaf, maker, piece_of
from tests.support.pools import Pools
from tests.tiers import THOROUGH
from zero_tp.parallel import linear
from zero_tp.parallel.collectives import Pending
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import Normal

LENGTH, BATCH, INPUTS, OUTPUTS = 8, 3, 10, 28
PRODUCTS = [
    getattr(getattr(torch.ops.aten, name), kind)
    for name in ("mm", "addmm")
    for kind in ("default", "out")
]


class Events(TorchDispatchMode):
    """Matrix products (by the shape of their result), starts of collectives and waits for them,
    in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in PRODUCTS:
            self.log.append(f"GEMM {list(result.shape)}")
        return result

    def recorded(self, name: str) -> Any:
        start = getattr(linear, f"start_{name}")
        events = self

        class Watched(Pending):
            def __init__(self, pending: Pending) -> None:
                self.pending, self.waited = pending, False

            def wait(self) -> Tensor:
                if not self.waited:
                    events.log.append(f"wait {name}")
                self.waited = True
                return self.pending.wait()

        def recorded_start(tensor: Tensor, group: Any) -> Pending:
            events.log.append(f"start {name}")
            return Watched(start(tensor, group))

        return patch.object(linear, f"start_{name}", recorded_start)


def backward_events(
    world: int, sequence: bool, frozen: str
) -> tuple[list[str], list[tuple[int, ...]]]:
    topology = grid(world, sequence)
    make = maker(topology, weight=torch.randn(OUTPUTS, INPUTS), bias=torch.randn(OUTPUTS))
    layer = ColumnParallelLinear(make, INPUTS, (OUTPUTS,), bias=True, init=Normal(1.0))
    layer.weight.requires_grad_(frozen != "weight")
    given = leaf(piece_of(torch.randn(LENGTH, BATCH, INPUTS), topology)).requires_grad_(
        frozen != "input"
    )
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(given, sequence=sequence)
    events = Events()
    with (
        events,
        events.recorded("all_gather"),
        events.recorded("reduce_scatter"),
        events.recorded("all_reduce"),
    ):
        output.backward(torch.ones_like(output))
    return events.log, saved


INPUT_GRADIENT, WEIGHT_GRADIENT = (
    f"GEMM {[LENGTH * BATCH, INPUTS]}",
    f"GEMM {[OUTPUTS // 2, INPUTS]}",
)


@pytest.mark.parametrize(
    ("sequence", "frozen", "expected"),
    [
        (False, "", [INPUT_GRADIENT, "start all_reduce", WEIGHT_GRADIENT, "wait all_reduce"]),
        (False, "weight", [INPUT_GRADIENT, "start all_reduce", "wait all_reduce"]),
        (
            True,
            "",
            [
                *("start all_gather", INPUT_GRADIENT, "wait all_gather"),
                *("start reduce_scatter", WEIGHT_GRADIENT, "wait reduce_scatter"),
            ],
        ),
        (True, "weight", [INPUT_GRADIENT, "start reduce_scatter", "wait reduce_scatter"]),
        (True, "input", ["start all_gather", "wait all_gather", WEIGHT_GRADIENT]),
    ],
)
def test_communication_runs_during_the_products(
    ranks: Pools, sequence: bool, frozen: str, expected: list[str]
) -> None:
    """Only the rank's shard of the input and the weight are saved for backward."""
    kept = LENGTH // 2 if sequence else LENGTH
    for log, saved in ranks(2).run(backward_events, 2, sequence, frozen):
        assert log == expected
        assert sorted(saved) == sorted([(kept, BATCH, INPUTS), (OUTPUTS // 2, INPUTS)])


def gathering_events(world: int, name: str, bias: bool) -> list[str]:
    """Return the events of a column layer's forward or a row layer's backward under SP, which
    gather and multiply.
    """
    topology = grid(world, True)
    make, init = (
        maker(topology, weight=torch.randn(OUTPUTS, INPUTS), bias=torch.randn(OUTPUTS)),
        Normal(1.0),
    )
    shard = leaf(torch.randn(LENGTH // world, BATCH, INPUTS))
    events = Events()
    if name == "column":
        column = ColumnParallelLinear(make, INPUTS, (OUTPUTS,), bias=bias, init=init)
        with events, events.recorded("all_gather"):
            column(shard, sequence=True)
        return events.log
    row = RowParallelLinear(make, INPUTS, OUTPUTS, bias=bias, init=init)
    output = row(leaf(torch.randn(LENGTH, BATCH, INPUTS // world)), sequence=True)
    with events, events.recorded("all_gather"):
        output.backward(torch.ones_like(output))
    return events.log


@THOROUGH
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "part", "after"),
    [
        ("column", f"GEMM {[LENGTH // 2 * BATCH, OUTPUTS // 2]}", []),
        ("row", f"GEMM {[LENGTH // 2 * BATCH, INPUTS // 2]}", [f"GEMM {[OUTPUTS, INPUTS // 2]}"]),
    ],
)
def test_own_rows_are_multiplied_during_the_gather(
    ranks: Pools, name: str, part: str, after: list[str], bias: bool
) -> None:
    for log in ranks(2).run(gathering_events, 2, name, bias):
        assert log == ["start all_gather", part, "wait all_gather", part, *after]
