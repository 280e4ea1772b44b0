"""Muon under TP, SP and every ZeRO stage against `torch.optim.Muon` and `torch.optim.AdamW` on
transformers' class, in one process.
"""

from __future__ import annotations

import copy
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.compare import check_close, grid, norm
from tests.support.decoders import MODEL_TYPES, decoder, decoder_fields
from tests.support.experts import fields as expert_fields
from tests.support.families import model_sizes
from tests.support.native import native_tensors, to_ours
from tests.support.pools import Pools
from tests.support.torch_optimizers import (
    TorchOptimizers,
    batches,
    engine_of,
    loss_of,
    own_pieces,
)
from tests.tiers import THOROUGH, examples, in_tiers
from zero_tp.engine.engine import TrainingEngine
from zero_tp.model.architectures import file_tensors
from zero_tp.parallel.layout import Replicated, layout_of
from zero_tp.parallel.topology import Topology

PARAMS: dict[str, Any] = {"lr": 1e-2, "adamw": {"lr": 4e-3, "betas": (0.8, 0.9), "eps": 1e-3}}


def compared(
    fields: dict[str, Any],
    seed: int,
    tensor: int,
    sequence: bool,
    stage: int,
    params: dict[str, Any],
    clip: float,
) -> list[float]:
    """Losses and weights after five steps of both; the losses."""
    reference = decoder(fields, seed)
    engine = engine_of(reference, tensor, sequence, stage, params, clip)
    optimizers = TorchOptimizers(reference, params, clip)
    topology = engine.topology
    losses = []
    for tokens in batches(fields, seed):
        losses.append(engine.train_step(own_pieces(tokens, topology)))
        reference.zero_grad()
        loss = loss_of(reference, tokens, topology)
        loss.backward()
        optimizers.step()
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    ours = dict(native_tensors(engine.model))
    # Routers' biases are buffers.
    stored = reference.state_dict().keys()
    theirs = {name: value.detach() for name, value in reference.named_parameters()}
    theirs |= {name: value for name, value in reference.named_buffers() if name in stored}
    check_close(ours, file_tensors(optimizers.weights, theirs))
    if not params.get("per_head"):
        check_states(engine, optimizers.states())
    return losses


ROUNDING = 2.0**-23  # a relative error of fp32
SETTLED = 2.5e-6  # a quarter of what `check_states` allows


def settled_seed(fields: dict[str, Any], seed: int, params: dict[str, Any], clip: float) -> int:
    """The first of the next seeds whose model torch itself trains to the same momentum, when each
    gradient has one more rounding error: iterations on a nearly singular matrix enlarge it.
    """
    for candidate in range(seed, seed + 20):
        momentum = [momentum_of(fields, candidate, params, clip, draw) for draw in (None, 1, 2, 3)]
        exact, *others = momentum
        if all(
            norm(other[name] - exact[name]) <= SETTLED * norm(exact[name])
            for other in others
            for name in exact
        ):
            return candidate
    raise AssertionError(f"rounding moves all models of the seeds {seed} to {candidate}: {fields}")


def momentum_of(
    fields: dict[str, Any], seed: int, params: dict[str, Any], clip: float, draw: int | None
) -> dict[str, Tensor]:
    """Torch's momentum after the steps; with `draw` of gradients with another rounding."""
    reference = decoder(fields, seed)
    optimizers = TorchOptimizers(reference, params | {"per_head": False}, clip)
    generator = None if draw is None else torch.Generator().manual_seed(draw)
    for tokens in batches(fields, seed):
        reference.zero_grad()
        loss_of(reference, tokens, Topology(world=1)).backward()
        optimizers.step(perturbation=generator, error=ROUNDING)
    return optimizers.states()["momentum_buffer"]


def check_states(engine: Any, expected: dict[str, dict[str, Tensor]]) -> None:
    """Each of this rank's fragments has the states of its kind of optimizer, and torch's values."""
    states, topology = engine.zero.states(), engine.topology
    parameters = dict(engine.model.named_parameters())
    assert states.kinds() == ["master", "momentum_buffer", "exp_avg", "exp_avg_sq"]
    for fragment in states.fragments:
        layout = layout_of(parameters[fragment.name])
        for kind, tensors in expected.items():
            assert states.has(fragment, kind) == (fragment.name in tensors), fragment.name
            if fragment.name not in tensors:
                continue
            whole = tensors[fragment.name]
            shard = layout.shard(whole, topology.tensor_rank, topology.tensor).flatten()
            allowed = 1e-5 * whole.norm() / whole.numel() ** 0.5 + 1e-9
            error = states.get(fragment, kind) - shard[fragment.span.whole]
            assert error.norm() <= allowed * max(whole.numel(), 1) ** 0.5, (fragment.name, kind)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": (model_sizes(3, "gpt2"), {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}),
    "heads": (model_sizes(3, "fewer KV heads than TP"), {"per_head": True, "weight_decay": 0.05}),
    "experts": (expert_fields("qwen2_moe"), {"ns_steps": 4}),
}
"""Model and settings of Muon by name."""


@pytest.mark.parametrize("name", in_tiers(list(SETTINGS), ["heads"]))
@pytest.mark.parametrize(
    ("tensor", "stage"),
    in_tiers([(2, 1), (4, 3), (4, 0), (1, 2)], [(2, 1)]),
)
def test_muon_equals_torchs(ranks: Pools, name: str, tensor: int, stage: int) -> None:
    fields, settings = SETTINGS[name]
    params = PARAMS | settings
    found = ranks(4).run(compared, fields, 5, tensor, tensor > 1, stage, params, 0.3)
    assert found == found[:1] * 4


OF_FAMILIES = [
    (name, tensor, stage) for name in MODEL_TYPES for tensor in (1, 2, 4) for stage in range(4)
]


@THOROUGH
@pytest.mark.parametrize(
    ("model_type", "tensor", "stage"), in_tiers(OF_FAMILIES, OF_FAMILIES[:1], every=5)
)
@examples(1, 1)
@given(data=st.data())
def test_muon_of_each_family(
    ranks: Pools, model_type: str, tensor: int, stage: int, data: st.DataObject
) -> None:
    fields = data.draw(decoder_fields(model_type))
    seed = data.draw(st.integers(0, 2**31), label="seed")
    clip = data.draw(st.sampled_from([0.0, 0.3]), label="clip")
    adamw_decay = data.draw(st.sampled_from([None, 0.02]), label="AdamW's decay")
    adamw = PARAMS["adamw"] | ({} if adamw_decay is None else {"weight_decay": adamw_decay})
    params = {
        "lr": PARAMS["lr"],
        "adamw": adamw,
        "momentum": data.draw(st.sampled_from([0.0, 0.9, 0.95]), label="momentum"),
        "weight_decay": data.draw(st.sampled_from([0.0, 0.1]), label="decay"),
        "ns_steps": data.draw(st.sampled_from([3, 5]), label="iterations"),
        "ns_coefficients": data.draw(
            st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]), label="coefficients"
        ),
        "eps": data.draw(st.sampled_from([1e-7, 1e-5]), label="ε"),
        "per_head": data.draw(st.booleans(), label="each head"),
        "nesterov": data.draw(st.booleans(), label="Nesterov"),
        "adjust_lr_fn": data.draw(
            st.sampled_from([None, "original", "match_rms_adamw"]), label="rate"
        ),
    }
    seed = settled_seed(fields, seed, params, clip)
    found = ranks(4).run(compared, fields, seed, tensor, tensor > 1, stage, params, clip)
    assert found == found[:1] * 4


SIXTEEN_BITS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16),
    "bf16, fp32 accumulation": (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        torch.bfloat16,
    ),
}
"""DeepSpeed's settings and the dtype of weights and gradients, by name. It has no fp16 on CPUs."""


def masters_in_16_bits(
    fields: dict[str, Any],
    seed: int,
    topology: Any,
    dtype: torch.dtype,
    perturbation: int | None,
) -> dict[str, Tensor]:
    """The masters after torch's steps, whose gradients are computed in 16 bits, by our names."""
    # A run's masters begin as its weights, which are drawn in its dtype.
    reference = decoder(fields, seed).to(dtype).float()
    optimizers = TorchOptimizers(reference, PARAMS, 0.3)
    rounded = copy.deepcopy(reference).to(dtype)
    draw = None if perturbation is None else torch.Generator().manual_seed(perturbation)
    for tokens in batches(fields, seed):
        rounded.load_state_dict(reference.state_dict())
        rounded.zero_grad()
        loss_of(rounded, tokens, topology).backward()
        optimizers.step(rounded, draw)
    return to_ours(reference.config, reference.state_dict())


def distances_in_16_bits(
    fields: dict[str, Any], seed: int, tensor: int, sequence: bool, stage: int, name: str
) -> tuple[float, list[float]]:
    """How far our masters are from torch's after five steps in 16 bits, and how far torch's own
    move when their gradients are perturbed.
    """
    settings, dtype = SIXTEEN_BITS[name]
    reference = decoder(fields, seed)
    engine = engine_of(reference, tensor, sequence, stage, PARAMS, 0.3, **settings)
    topology = engine.topology
    for tokens in batches(fields, seed):
        engine.train_step(own_pieces(tokens, topology))
    expected = masters_in_16_bits(fields, seed, topology, dtype, None)
    parameters = dict(engine.model.named_parameters())
    squares = torch.zeros(())
    for fragment in engine.zero.states().fragments:
        layout = layout_of(parameters[fragment.name])
        shard = layout.shard(expected[fragment.name], topology.tensor_rank, topology.tensor)
        error = fragment.master - shard.flatten()[fragment.span.whole]
        copies = topology.tensor if isinstance(layout, Replicated) else 1
        squares += error.square().sum() / (copies * (topology.data if stage == 0 else 1))
    torch.distributed.all_reduce(squares)
    others = [
        masters_in_16_bits(fields, seed, topology, dtype, number)
        for number in range(5 if topology.rank == 0 else 0)
    ]
    moved = [norm(*(other[name] - expected[name] for name in other)) for other in others]
    return float(squares.sqrt()), moved


@THOROUGH
@pytest.mark.parametrize("family", ["gpt2", "grouped queries"])
@pytest.mark.parametrize(
    ("tensor", "stage", "name"),
    [
        *((*grid, "bf16") for grid in ((1, 2), (2, 1), (4, 0))),
        *((*grid, "bf16, fp32 accumulation") for grid in ((1, 1), (2, 1))),
    ],
)
def test_16_bits_are_as_near_as_a_rounding_of_the_gradients(
    ranks: Pools, run_seed: int, family: str, tensor: int, stage: int, name: str
) -> None:
    """As torch's own result under a perturbation of its gradients by one rounding."""
    fields = model_sizes(run_seed, family)
    found = ranks(4).run(distances_in_16_bits, fields, run_seed, tensor, tensor > 1, stage, name)
    error, moved = found[0]
    assert error <= 1.5 * statistics.median(moved)


def skipped(stage: int, tensor: int) -> bool:
    """A step whose gradients are not finite on one rank changes no master and no state."""
    reference = decoder(model_sizes(1, "gpt2"), 1)
    engine = engine_of(reference, tensor, tensor > 1, stage, PARAMS, 0.3)
    tokens = batches(model_sizes(1, "gpt2"), 1)
    topology = engine.topology
    engine.train_step(own_pieces(tokens[0], topology))
    states = engine.zero.states()
    before = [
        (fragment, kind, states.get(fragment, kind).clone())
        for fragment in states.fragments
        for kind in states.kinds()
        if states.has(fragment, kind)
    ]
    parameter = engine.model.get_parameter("transformer.layers.0.mlp.up.weight")
    hook = parameter.register_hook(
        lambda gradient: gradient * (math.nan if topology.rank == topology.world - 1 else 1.0)
    )
    engine.train_step(own_pieces(tokens[1], topology))
    assert engine.skipped
    hook.remove()
    for fragment, kind, tensor_before in before:
        assert torch.equal(states.get(fragment, kind), tensor_before), (fragment.name, kind)
    engine.train_step(own_pieces(tokens[2], topology))
    return not engine.skipped


@pytest.mark.parametrize("stage", in_tiers([0, 1, 2, 3], [2]))
def test_a_skipped_step_changes_nothing(ranks: Pools, stage: int) -> None:
    assert ranks(4).run(skipped, stage, 2) == [True] * 4


def rates_of(schedule: dict[str, Any]) -> list[float]:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": 2e-2, "adamw": {"lr": 1e-2}}},
        "scheduler": schedule,
    }
    fields = model_sizes(3, "gpt2")
    reference = decoder(fields, 5)
    engine = TrainingEngine.from_dict(reference.config, grid(1, False), settings, seed=0)
    tokens = batches(fields, 1)[0][:1]
    rates = []
    for _ in range(4):
        matrices, decayed, _ = engine.zero.optimizer.param_groups
        assert decayed["lr"] == pytest.approx(matrices["lr"] / 2)
        rates.append(float(matrices["lr"]))
        engine.train_step([(tokens[:, :-1], tokens[:, 1:])])
    return rates


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            {
                "type": "cosine_with_min_lr",
                "params": {"num_warmup_steps": 1, "num_training_steps": 3, "min_lr": 2e-3},
            },
            [0.02, 0.011, 0.002, 0.002],
        ),
        (
            {
                "type": "polynomial",
                "params": {"num_warmup_steps": 1, "num_training_steps": 3, "lr_end": 4e-3},
            },
            [0.02, 0.012, 0.004, 0.004],
        ),
    ],
)
def test_schedules_move_both_rates(
    ranks: Pools, schedule: dict[str, Any], expected: list[float]
) -> None:
    """Some of transformers' read the rate in the optimizer's defaults."""
    assert ranks(1).run(rates_of, schedule)[0] == pytest.approx(expected)
