"""What a run checks of itself stops it when it is wrong, and names the parameter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GPT2Config

from tests.pools import Pools, RankError
from zero_tp.topology import Topology


def build(stage: int, dtype: str = "fp32") -> Any:
    from zero_tp.training.engine import TrainingEngine

    config = GPT2Config(n_layer=1, n_embd=24, n_head=4, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
    return TrainingEngine(config, Topology(2, True), settings, seed=1)


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        tokens = torch.arange(18).reshape(2, 9) + engine.topology.data_rank
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])


def disturb(stage: int, dtype: str, name: str) -> str:
    """The message on a rank of the TP group in which rank 1 holds another value at one place; "" if there is none."""
    from zero_tp.errors import UserError
    from zero_tp.training.guards import check_replicas

    engine = build(stage, dtype)
    train(engine, 1)
    check_replicas(engine.model, engine.topology, 1)
    parameter = dict(engine.model.named_parameters())[name]
    held = parameter.ds_tensor if stage == 3 else parameter.data
    if engine.topology.tensor_rank == 1 and engine.topology.data_rank == 0:
        with torch.no_grad():
            held.flatten()[-1:].mul_(1 + 2.0**-7).add_(2.0**-20)  # the last bits of a bf16 number
    try:
        check_replicas(engine.model, engine.topology, 7)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_replica_that_drifts_is_named(ranks: Pools, stage: int, dtype: str) -> None:
    name = "transformer.layers.0.mlp_norm.weight"
    first, second, *others = ranks(4).run(disturb, stage, dtype, name)
    assert first == second and first.startswith(
        f"after step 7 parameter {name} differs between tensor parallel ranks by"
    )
    assert others == ["", ""], "the other replica's TP group is whole"


def without_a_hook() -> None:
    from zero_tp.parallel import gradients

    original = gradients._hooked
    gradients._hooked = lambda parameter, group: gradients.GradientSum(group)
    try:
        train(build(1), 1)
    finally:
        gradients._hooked = original


def test_a_hook_that_does_not_fire_is_named(ranks: Pools) -> None:
    with pytest.raises(RankError, match=r"position\.weight was not summed over tensor parallel ranks"):
        ranks(2).run(without_a_hook)


def with_a_norm_that_does_not_sum() -> None:
    engine = build(1)
    engine.model.transformer.layers[0].mlp_norm.gradient_sum = None
    train(engine, 1)


def test_a_norm_that_does_not_sum_is_named(ranks: Pools) -> None:
    with pytest.raises(RankError, match=r"layers\.0\.mlp_norm\.weight was not summed over tensor parallel ranks"):
        ranks(2).run(with_a_norm_that_does_not_sum)


def drifting(interval: int) -> int:
    """Trains with a norm whose gradient is not summed, checking as the loop does; the step that found it."""
    from zero_tp.errors import UserError
    from zero_tp.parallel import gradients
    from zero_tp.parallel.collectives import Pending
    from zero_tp.training.guards import check_replicas

    engine = build(1)
    summed = gradients.start_all_reduce
    gradients.start_all_reduce = lambda tensor, group: Pending(tensor)
    try:
        for step in range(1, 10):
            train(engine, 1)
            if step % interval == 0:
                check_replicas(engine.model, engine.topology, step)
    except UserError:
        return step
    finally:
        gradients.start_all_reduce = summed
    return 0


def test_an_unsummed_norm_gradient_is_found_at_the_next_check(ranks: Pools) -> None:
    assert ranks(2).run(drifting, 3) == [3, 3]
