"""What a run checks of itself stops it when it is wrong, and names the parameter."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support import experts
from tests.support.compare import grid
from tests.support.encoders import encoder, rows_for
from tests.support.experts import reference_model
from tests.support.native import parallel_model
from tests.support.pools import Pools, RankError
from tests.support.settings import deepspeed_settings, gpt2_config, replica, rows
from tests.support.tiny_models import bert_fields
from tests.tiers import THOROUGH, in_tiers
from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.base.errors import UserError
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.guards import check_hooks, check_replicas
from zero_tp.engine.zero.states import partition_of
from zero_tp.parallel import gradients
from zero_tp.parallel.topology import Topology


def build(stage: int, dtype: str = "fp32") -> Any:
    config = gpt2_config(0.1, n_layer=1, vocab_size=50, n_positions=8)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings = deepspeed_settings(
        stage, micro_batch=2, dtype=dtype, lr=1e-2, zero_optimization=zero
    )
    return TrainingEngine.from_dict(config, Topology(2, True), settings, seed=1)


def train(engine: Any, steps: int) -> None:
    for _ in range(steps):
        tokens = torch.arange(18).reshape(2, 9) + engine.topology.data_rank
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])


def disturb(stage: int, dtype: str, name: str) -> str:
    """The message on a rank of the TP group in which rank 1 holds another value at one place; ""
    if there is none.
    """
    engine = build(stage, dtype)
    train(engine, 1)
    check_replicas(engine.model, engine.topology, 1)
    parameter = dict(engine.model.named_parameters())[name]
    values = parameter.ds_tensor if stage == 3 else parameter.data
    if engine.topology.tensor_rank == 1 and engine.topology.data_rank == 0:
        with torch.no_grad():
            values.flatten()[-1:].mul_(1 + 2.0**-7).add_(2.0**-20)  # the last bits of a bf16 number
    try:
        check_replicas(engine.model, engine.topology, 7)
    except UserError as error:
        return str(error)
    return ""


def test_the_padding_of_a_partition_is_not_compared() -> None:
    """Of 7 elements over 2 ranks rank 1 has 3, and DeepSpeed leaves the fourth as it is."""
    parameter: Any = torch.zeros(7)
    parameter.ds_numel, parameter.ds_tensor = 7, torch.tensor([4.0, 5.0, 6.0, torch.nan])
    parameter.ds_tensor.ds_numel = 4
    assert partition_of(parameter, 1).tolist() == [4.0, 5.0, 6.0]
    assert len(partition_of(parameter, 0)) == 4 and len(partition_of(parameter, 2)) == 0


DRIFTS = [(stage, dtype) for stage in (0, 1, 3) for dtype in ("fp32", "bf16")]


@pytest.mark.parametrize(("stage", "dtype"), in_tiers(DRIFTS, [(0, "fp32"), (3, "bf16")]))
def test_a_replica_that_drifts_is_named(ranks: Pools, stage: int, dtype: str) -> None:
    name = "transformer.layers.0.mlp_norm.weight"
    first, second, *others = ranks(4).run(disturb, stage, dtype, name)
    assert first == second and first.startswith(
        f"after step 7 parameter {name} differs between tensor parallel ranks by"
    )
    assert others == ["", ""], "the other replica's TP group is whole"


def without_a_hook() -> None:
    original = gradients._register_sum
    gradients._register_sum = lambda parameter, group: gradients.GradientSum(group)
    try:
        train(build(1), 1)
    finally:
        gradients._register_sum = original


def with_a_norm_that_does_not_sum() -> None:
    engine = build(1)
    train(engine, 1)
    engine.model.transformer.layers[0].mlp_norm.gradient_sum = None
    train(engine, 1)


@pytest.mark.parametrize(
    ("broken", "parameter"),
    [
        (without_a_hook, "position.weight"),
        (with_a_norm_that_does_not_sum, "layers.0.mlp_norm.weight"),
    ],
)
def test_a_gradient_that_is_not_summed_is_named(
    ranks: Pools, broken: Callable[[], None], parameter: str
) -> None:
    with pytest.raises(
        RankError, match=rf"{re.escape(parameter)} was not summed over tensor parallel ranks"
    ):
        ranks(2).run(broken)


def with_a_frozen_norm() -> bool:
    """Return whether two steps have trained all but the frozen norm."""
    engine = build(1)
    engine.model.transformer.layers[0].mlp_norm.requires_grad_(False)
    before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
    train(engine, 2)
    same = {
        name
        for name, parameter in engine.model.named_parameters()
        if torch.equal(parameter, before[name])
    }
    return same == {name for name in before if "layers.0.mlp_norm." in name}


def test_a_frozen_parameter_needs_no_sum(ranks: Pools) -> None:
    assert ranks(2).run(with_a_frozen_norm) == [True, True]


def without_labels(model_type: str) -> int:
    """Return the number of sums that a micro-batch without labels runs, each of them."""
    if model_type == "bert":
        sizes = {
            "vocab_size": 61,
            "hidden_size": 24,
            "max_position_embeddings": 16,
            "type_vocab_size": 2,
        }
        fields = bert_fields(model_type="bert", pad_token_id=0, architectures=None, **sizes)
        reference, batch = encoder(fields, 1), rows_for(fields, 1)
        batch["next_sentence_label"].fill_(IGNORE_INDEX)
        divisors: dict[str, float] = {"num_items_in_batch": 0, "num_rows_in_batch": 0}
    else:
        reference, batch = (
            reference_model(experts.fields(model_type), 1),
            experts.inputs(61, padded=True),
        )
        divisors = {"num_items_in_batch": 0}
    model = parallel_model(reference, grid(2, True)).train()
    batch["labels"] = torch.full_like(batch["input_ids"], IGNORE_INDEX)
    for _ in range(2):
        model(**batch, **divisors).loss.backward()
        check_hooks(model)
    return len(model.gradient_hooks.sums)


@pytest.mark.parametrize("model_type", ["bert", "mixtral", "qwen2_moe"])
def test_a_micro_batch_without_labels_sums_every_gradient(ranks: Pools, model_type: str) -> None:
    first, second = ranks(2).run(without_labels, model_type)
    assert first == second > 5


# --- what data-parallel ranks hold twice ----------------------------------------------------------


def corrupted(stage: int, dtype: str, kind: str, tensor: int = 1) -> str:
    """The message on a rank, after the last rank's copy of something got one other bit."""
    engine = replica(stage, dtype, tensor)
    for step in (1, 2):
        engine.train_step(rows(engine, step), guarded=step)
    name = "transformer.layers.0.mlp_norm.weight"
    if engine.topology.rank == engine.topology.world - 1:
        if kind == "weight":
            values = engine.model.get_parameter(name).data
        else:
            states = engine.zero.states()
            values = states.get(next(each for each in states.fragments if each.name == name), kind)
        bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
        bits.view(-1)[3] ^= 1
    try:
        engine.train_step(rows(engine, 3), guarded=3)
    except UserError as error:
        return str(error)
    return ""


HELD_TWICE = [
    *((stage, dtype, "weight") for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
    *(
        (0, dtype, kind)
        for dtype, kind in (("bf16", "master"), ("bf16", "exp_avg"), ("fp32", "exp_avg_sq"))
    ),
]


FIRST = [(0, "bf16", "master"), (1, "fp32", "weight"), (2, "bf16", "weight"), (3, "fp32", "weight")]


@pytest.mark.parametrize(("stage", "dtype", "kind"), in_tiers(HELD_TWICE, FIRST))
def test_one_changed_bit_of_what_replicas_hold_twice_names_the_odd_one(
    ranks: Pools, stage: int, dtype: str, kind: str
) -> None:
    name = "transformer.layers.0.mlp_norm.weight" + (f" ({kind})" if kind != "weight" else "")
    for message in ranks(3).run(corrupted, stage, dtype, kind):
        assert message.startswith(
            f"before the update of step 3 parameter {name} on rank 2 differs from the other "
            "data-parallel ranks: "
        ), message


@pytest.mark.parametrize("tensor", in_tiers([1, 2], [2]))
def test_of_two_replicas_both_are_named(ranks: Pools, tensor: int) -> None:
    both = "ranks 0 and 1" if tensor == 1 else "ranks 1 and 3"
    for message in ranks(2 * tensor).run(corrupted, 1, "fp32", "weight", tensor):
        assert (
            f"mlp_norm.weight differs between data-parallel {both}: memory or a message was "
            "corrupted" in message
        )


def repeated(stage: int, recompute: str, faulty: bool) -> tuple[list[float], str]:
    """Losses and norms of steps with the repetition at each, or without where nothing is faulty;
    the message.
    """
    engine = replica(stage, tensor=2, recompute=RecomputePolicy(mode=recompute))
    numbers: list[float] = []
    calls = 0

    def flip(module: Any, _: Any, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the second of the two runs
            output = output.clone()
            output.view(-1)[5] += 2.0**-12
            return output
        return None

    if faulty and engine.topology.rank == 3:
        engine.model.transformer.layers[0].mlp.register_forward_hook(flip)
    try:
        for step in range(3):
            numbers += (
                engine.train_step(rows(engine, step), guarded=step, guard_gradients=True),
                engine.gradient_norm,
            )
    except UserError as error:
        return numbers, str(error)
    other = replica(stage, tensor=2, recompute=RecomputePolicy(mode=recompute))
    for step in range(3):
        numbers += (-other.train_step(rows(other, step)), -other.gradient_norm)
    return numbers, ""


REPEATED = [(stage, recompute) for stage in (0, 1, 2, 3) for recompute in ("none", "full")]


@THOROUGH
@pytest.mark.parametrize(("stage", "recompute"), in_tiers(REPEATED, [(3, "full")]))
def test_a_repeated_micro_batch_changes_nothing(ranks: Pools, stage: int, recompute: str) -> None:
    for numbers, message in ranks(4).run(repeated, stage, recompute, False):
        assert message == "" and len(numbers) == 12
        assert numbers[:6] == [-number for number in numbers[6:]]


@pytest.mark.parametrize("stage", in_tiers([1, 3], [1]))
def test_a_gradient_that_does_not_come_again_names_the_rank(ranks: Pools, stage: int) -> None:
    for _, message in ranks(4).run(repeated, stage, "none", True):
        # What rank 3 computes wrongly reaches rank 2, of its TP group, and no other replica.
        assert "differs between two runs of one micro-batch on ranks 2 and 3" in message, message
