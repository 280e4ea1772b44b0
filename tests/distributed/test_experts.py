"""Mixtures of experts over TP ranks against transformers' own classes in one process: a bare backward, no DeepSpeed."""

from __future__ import annotations

import pytest

from tests.compare import check_close, grid, whole_gradients
from tests.experts import ROUTINGS, fields, inputs, reference_model, tables
from tests.native import gradients, parallel_model, to_ours
from tests.pools import Pools
from zero_tp.parallel.layout import audit


def same_as_native(world: int, sequence: bool, routing: str) -> int:
    reference = reference_model(fields(), 1, routing)
    batch = inputs(61, padded=True)
    expected = reference(**batch)
    expected.loss.backward()
    with tables():
        model = parallel_model(reference, grid(world, sequence)).train()
        audit(model, model.topology)
        found = model(**batch, return_logits=True)
        assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
        found.loss.backward()
        assert all(fired == 1 for fired in model.gradient_hooks.fired.values())
        ours = whole_gradients(model)
        check_close(ours, to_ours(model.config, gradients(reference)))
    return sum(name.endswith("router.weight") for name in model.gradient_hooks.fired)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 4])
def test_both_losses_and_every_gradient(ranks: Pools, world: int, sequence: bool, routing: str) -> None:
    """The router of each of 3 layers has a partial gradient, and a hook sums it."""
    assert ranks(world).run(same_as_native, world, sequence, routing) == [3] * world
