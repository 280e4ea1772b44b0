"""Draws from random streams as a training run makes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero_tp.parallel.random import PER_RANK, SHARED, RandomStreams
from zero_tp.parallel.topology import Topology


def same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))


OUTSIDE = 6
"""Draws of `draw_as_a_run` from the default generator."""


def draw_as_a_run(streams: RandomStreams, draw: Callable[[], Tensor]) -> list[Tensor]:
    """Draw as a training run does: in forward, again in backward, after an error, after a resume.

    Returns:
        The draws outside of the streams, then those from them.
    """
    outside, inside = [draw()], []

    def use(*names: str) -> list[Tensor]:
        draws = []
        for name in names:
            with streams.use(name):
                draws.append(draw())
        inside.extend(draws)
        return draws

    use(SHARED, PER_RANK, SHARED)
    outside.append(draw())
    snapshot = streams.snapshot()
    first = use(SHARED, PER_RANK)
    later_snapshot = streams.snapshot()
    second = use(SHARED, PER_RANK)
    assert not any(map(torch.equal, first, second))
    for replayed, expected in (
        (later_snapshot, second),
        (snapshot, first),
        (later_snapshot, second),
    ):
        with streams.replaying(replayed):
            assert same(use(SHARED, PER_RANK), expected)
        outside.append(draw())
    use(SHARED)
    saved = streams.state_dict()
    expected = use(PER_RANK, SHARED)
    with pytest.raises(ArithmeticError), streams.use(SHARED):
        inside.append(draw())
        raise ArithmeticError
    outside.append(draw())
    for _ in range(2):  # loading copies the state
        streams.load_state_dict(saved)
        assert same(use(PER_RANK, SHARED), expected)
    streams.reseed(Topology(), 6)
    use(SHARED, PER_RANK)
    assert len(outside) == OUTSIDE
    return [*outside, *inside]
