"""Muon's parts by themselves: products, the owners of matrices, and the factor of the rate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_tp.engine.zero.matrices import Matrix
from zero_tp.engine.zero.matrix_exchange import assign_owners
from zero_tp.engine.zero.orthogonalize import NewtonSchulz, rate_factor


@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    steps=st.integers(1, 6),
    seed=st.integers(0, 2**31),
)
def test_products_in_bf16_are_torchs(rows: int, columns: int, steps: int, seed: int) -> None:
    """Bit for bit, so that a 16-bit run's update of a matrix is torch's."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    coefficients = (3.4445, -4.775, 2.0315)
    iteration = NewtonSchulz(steps, coefficients, 1e-7, torch.bfloat16)
    expected = _zeropower_via_newtonschulz(matrix, coefficients, steps, 1e-7)
    assert torch.equal(iteration.orthogonalize(matrix), expected)


@given(data=st.data())
def test_no_owner_has_more_than_one_matrix_above_the_mean(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 10**6), max_size=60))
    ranks = data.draw(st.integers(1, 9))
    owners = assign_owners(costs, ranks)
    loads = [0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        loads[owner] += cost
    assert max(loads) <= sum(costs) / ranks + max(costs, default=0)


def test_the_rate_is_that_of_the_stored_shape() -> None:
    """GPT-2's files have [in, out]."""
    matrix = Matrix("mlp.c_fc.weight", (12, 3), True, ())
    assert rate_factor(None, *matrix.stored_shape) == 1.0
    assert rate_factor(None, *replace(matrix, is_transposed=False).stored_shape) == 2.0
    assert rate_factor("match_rms_adamw", *matrix.stored_shape) == pytest.approx(0.2 * 12**0.5)
