"""Where a training step returns freed memory: before each gradient of the embedding, and at its
end.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.small_engine import ACCUMULATION, build, tokens_of_step
from zero_tp.engine import engine as engine_module
from zero_tp.parallel import embedding as embedding_module
from zero_tp.parallel.cpu import heap


def places(tensor: int, returns: bool) -> list[str]:
    """Return where a step of one rank returned memory, in order."""
    topology = grid(tensor, False)
    engine = build(topology, 1)
    calls: list[str] = []

    def noted(module: Any, name: str) -> Any:
        return mock.patch.object(module, "return_freed_memory", lambda: calls.append(name))

    own = tokens_of_step(0).chunk(topology.data)[topology.data_rank]
    batches = [(part[:, :-1], part[:, 1:]) for part in own.chunk(ACCUMULATION)]
    with (
        mock.patch.object(heap._Heap, "returns", returns),
        noted(embedding_module, "embedding"),
        noted(engine_module, "step"),
    ):
        engine.train_step(batches)
    return calls


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_step_returns_freed_memory(ranks: Pools, tensor: int) -> None:
    assert ranks(2).run(places, tensor, True) == [["embedding"] * ACCUMULATION + ["step"]] * 2
    assert ranks(2).run(places, tensor, False) == [["step"]] * 2
