"""Mixtures of experts over TP ranks against transformers' own classes in one process: a bare backward, no DeepSpeed."""

from __future__ import annotations

import pytest
import torch

from tests.compare import check_close, grid, whole_gradients
from tests.experts import OWN, ROUTINGS, fields, inputs, reference_model
from tests.native import gradients, parallel_model, to_ours
from tests.pools import Pools
from zero_tp.parallel.layout import audit


def same_as_native(model_type: str, world: int, sequence: bool, routing: str) -> tuple[int, int]:
    reference = reference_model(fields(model_type), 1, routing)
    batch = inputs(61, padded=True)
    expected = reference(**batch)
    expected.loss.backward()
    model = parallel_model(reference, grid(world, sequence)).train()
    audit(model, model.topology)
    found = model(**batch, return_logits=True)
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert found.aux_loss.item() == pytest.approx(expected.aux_loss.item(), rel=1e-5)
    found.loss.backward()
    assert all(fired == 1 for fired in model.gradient_hooks.fired.values())
    ours = whole_gradients(model)
    check_close(ours, to_ours(model.config, gradients(reference)))
    routers = sum(name.endswith("router.weight") for name in model.gradient_hooks.fired)
    return routers, sum(name.endswith("shared.gate") for name in model.gradient_hooks.fired)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model_type", OWN)
def test_both_losses_and_every_gradient(
    ranks: Pools, model_type: str, world: int, sequence: bool, routing: str
) -> None:
    """The router of each layer with experts has a partial gradient, and a hook sums it; under SP the shared expert's
    gate too."""
    layers = 2 if model_type == "qwen2_moe" else 3
    shared = layers if sequence and model_type == "qwen2_moe" else 0
    found = ranks(world).run(same_as_native, model_type, world, sequence, routing)
    assert found == [(layers, shared)] * world


def chosen_on_ranks(world: int, sequence: bool, routing: str) -> list[torch.Tensor]:
    """Every router's choice, [n, k]."""
    reference = reference_model(fields(), 1, routing)
    chosen: list[torch.Tensor] = []
    model = parallel_model(reference, grid(world, sequence)).train()
    for layer in model.transformer.layers:
        layer.mlp.router.register_forward_hook(lambda *call: chosen.append(call[2][1]))
    model(**inputs(61, padded=True))
    return chosen


@pytest.mark.parametrize("routing", ["random", "ties"])
@pytest.mark.parametrize("sequence", [False, True])
def test_all_ranks_choose_the_same_experts(ranks: Pools, sequence: bool, routing: str) -> None:
    first, *others = ranks(4).run(chosen_on_ranks, 4, sequence, routing)
    assert len(first) == 3
    for other in others:
        assert all(torch.equal(one, same) for one, same in zip(first, other, strict=True))


def train_guarded(guarded: bool) -> str:
    """The message on a rank of a step in which rank 1's second router has its rows in another order, or ""."""
    from transformers import AutoConfig

    from zero_tp.errors import UserError
    from zero_tp.training.engine import TrainingEngine

    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    config = AutoConfig.for_model(**fields())
    batch = inputs(61, padded=False)["input_ids"]
    engine = TrainingEngine(config, grid(2, False), settings, seed=1)
    engine.train_step([(batch[:, :-1], batch[:, 1:])], guarded=1)
    if engine.topology.tensor_rank == 1:
        weight = engine.model.get_parameter("transformer.layers.1.mlp.router.weight").data
        weight.copy_(weight.flip(0))
    try:
        engine.train_step([(batch[:, :-1], batch[:, 1:])], guarded=2 if guarded else None)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("guarded", [True, False])
def test_ranks_that_choose_otherwise_are_stopped(ranks: Pools, guarded: bool) -> None:
    expected = "in step 2 transformer.layers.1.mlp.router chose other experts" if guarded else ""
    for message in ranks(2).run(train_guarded, guarded):
        assert message.startswith(expected) and bool(message) == guarded
