"""The update of routers' biases against transformers' class, counted and moved in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.compare import grid
from tests.support.corrected_routers import (
    LENGTH,
    VOCABULARY,
    biases,
    counted_choices,
    move_biases,
    reference_model,
)
from tests.support.experts import fields
from tests.support.experts import reference_model as model_with_experts
from tests.support.native import Native, parallel_model
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.errors import ConfigError, UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.base.settings.schema import Spike, ZeroTP
from zero_tp.engine.bias_update import BiasUpdate
from zero_tp.model.moe import CorrectedRouter
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.topology import Topology
from zero_tp.run.config.model_block import check_model

RATE = 0.01
STEPS = 3


def routers(model: Any) -> list[CorrectedRouter]:
    return [module for module in model.modules() if isinstance(module, CorrectedRouter)]


def our_biases(model: Any) -> Tensor:
    return torch.stack([router.correction_bias for router in routers(model)]).clone()


def tokens_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (8, LENGTH), generator=generator)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_choices_are_counted_once_and_without_padding(mode: Any) -> None:
    """Also where backward runs the routers again; only in training, and only if asked."""
    reference = reference_model(1)
    tokens = tokens_of(0)
    mask = (torch.arange(LENGTH) < LENGTH - 2 * torch.arange(8)[:, None]).long()
    with counted_choices(reference, mask) as expected:
        reference(input_ids=tokens, attention_mask=mask)
    model = parallel_model(reference, Topology(world=1)).train()
    ActivationMemory(
        model, RecomputePolicy(mode=mode), ActivationCheckpointing(), torch.device("cpu")
    )
    with BiasUpdate(model, model.topology, RATE).counting():
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    model(tokens, attention_mask=mask, labels=tokens)
    assert torch.equal(torch.stack([router.choices for router in routers(model)]), expected)
    assert expected.sum() == 2 * 3 * mask.sum()


def engine_with(reference: Any, tensor: int, stage: int, **options: Any) -> Any:
    from zero_tp.engine.engine import TrainingEngine

    topology = grid(tensor, tensor > 1)
    # Key biases have a gradient of exactly zero, whose rounding a smaller eps would blow up.
    params = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.0, "torch_adam": True}
    settings = deepspeed_settings(
        stage,
        micro_batch=4 // topology.data,
        accumulation=2,
        optimizer={"type": "AdamW", "params": params},
        gradient_clipping=0.0,
        **options.pop("settings", {}),
    )
    return TrainingEngine.from_dict(
        reference.config,
        topology,
        settings,
        seed=0,
        source=Native(reference),
        router_bias_update_rate=RATE,
        **options,
    )


def own_rows(engine: Any, step: int) -> list[tuple[Tensor, Tensor]]:
    own = tokens_of(step).chunk(engine.topology.data)[engine.topology.data_rank]
    return [(rows[:, :-4], rows[:, 1:-3]) for rows in own.chunk(2)]


def trained_biases(seed: int, tensor: int, stage: int) -> list[list[float]]:
    """The engine's losses and biases of some steps equal those of the process alone."""
    reference = reference_model(seed)
    engine = engine_with(reference, tensor, stage, recompute=RecomputePolicy(mode="full"))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    before = biases(reference)
    for step in range(STEPS):
        rows = tokens_of(step)
        with counted_choices(reference) as counts:
            logits = reference(rows[:, :-4]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:-3].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move_biases(reference, counts, RATE)
        assert engine.train_step(own_rows(engine, step), guarded=step + 1) == pytest.approx(
            loss.item(), rel=1e-5
        )
        engine.evaluate(own_rows(engine, step))
        assert torch.equal(our_biases(engine.model), biases(reference))
    assert not torch.equal(biases(reference), before)
    return our_biases(engine.model).tolist()


@THOROUGH
@pytest.mark.parametrize(("tensor", "stage"), in_tiers([(1, 1), (2, 0), (2, 3), (4, 2)], [(2, 3)]))
def test_steps_move_the_biases(ranks: Pools, tensor: int, stage: int) -> None:
    found = ranks(4).run(trained_biases, 5, tensor, stage)
    assert found == found[:1] * 4


def skipped_steps(stage: int, why: str) -> tuple[bool, bool]:
    """Whether a skipped step moved the biases, and whether the next step, which is not, did."""
    spike = Spike(loss=1.5, window=4) if why == "spike" else None
    engine = engine_with(reference_model(1), 2, stage, spike=spike)
    before = our_biases(engine.model)
    if why == "spike":
        engine.zero.veto.recent = [[1e-3, 1e-3], [2e-3, 1e-3]]
        engine.train_step(own_rows(engine, 0))
        assert engine.spike
        engine.zero.veto.recent = [[1e3, 1e3], [2e3, 1e3]]
    else:
        scale = engine.model.transformer.final_norm.weight
        kept = scale.detach().clone()
        scale.data.fill_(math.inf)
        engine.train_step(own_rows(engine, 0))
        assert engine.skipped
        scale.data.copy_(kept)
    moved = not torch.equal(our_biases(engine.model), before)
    assert not any(router.choices.any() for router in routers(engine.model))
    engine.train_step(own_rows(engine, 0))
    return moved, not torch.equal(our_biases(engine.model), before)


@THOROUGH
@pytest.mark.parametrize(
    ("stage", "why"), in_tiers([(1, "inf"), (0, "inf"), (1, "spike")], [(1, "inf"), (1, "spike")])
)
def test_a_skipped_step_moves_no_bias(ranks: Pools, stage: int, why: str) -> None:
    assert ranks(2).run(skipped_steps, stage, why) == [(False, True)] * 2


def test_a_model_without_biases_is_refused() -> None:
    block = {
        "model": {"model_type": "gpt2"},
        "data": {"train": "x", "sequence_length": 16},
        "training": {"steps": 1, "router_bias_update_rate": 0.001},
    }
    message = r"router_bias_update_rate: no router of a gpt2 has a bias"
    with pytest.raises(ConfigError, match=message):
        check_model(ZeroTP.model_validate(block))
    model = parallel_model(model_with_experts(fields(), 1), Topology(world=1))
    with pytest.raises(UserError, match="no router of a mixtral has a bias"):
        BiasUpdate(model, model.topology, RATE)


def biases_in_bf16(stage: int) -> tuple[str, bool]:
    """Their dtype, and whether a step moved each by the rate or not at all, without rounding."""
    reference = reference_model(1)
    engine = engine_with(reference, 2, stage, settings={"dtype": "bf16"})
    assert torch.equal(our_biases(engine.model), biases(reference))
    engine.train_step(own_rows(engine, 0))
    found = our_biases(engine.model)
    allowed = torch.stack([biases(reference) + RATE * sign for sign in (-1, 0, 1)])
    return str(found.dtype), bool((allowed == found).any(0).all())


@THOROUGH
@pytest.mark.parametrize("stage", in_tiers([0, 1, 2, 3], [3]))
def test_biases_stay_in_fp32(ranks: Pools, stage: int) -> None:
    assert ranks(2).run(biases_in_bf16, stage) == [("torch.float32", True)] * 2


def test_a_cast_keeps_the_biases() -> None:
    reference = reference_model(1)
    model = parallel_model(reference, Topology(world=1))
    expected = our_biases(model)
    cast = model.to(torch.bfloat16)
    assert cast.transformer.layers[1].mlp.router.weight.dtype == torch.bfloat16
    assert torch.equal(our_biases(cast), expected)
    assert our_biases(cast).dtype == torch.float32
