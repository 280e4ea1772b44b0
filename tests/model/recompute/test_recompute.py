"""Recomputation changes no bit: losses, gradient norms and weights equal those of a run that
keeps everything.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from tests.support.compare import gradient_of, grid
from tests.support.encoders import rows_for
from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.support.tiny_models import bert_fields
from tests.tiers import EACH_STAGE, THOROUGH, in_tiers
from zero_tp.base.errors import UserError
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.data.batch import MaskedBatch
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.topology import Topology

STEPS, ACCUMULATION, BATCH, SEQUENCE = 2, 2, 8, 12

P_A, CPU = {"partition_activations": True}, {"cpu_checkpointing": True}
CONTIGUOUS = {"contiguous_memory_optimization": True}
ALL_MODULES = ["attention_core", "mlp_activation", "norm"]
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"mode": "none"}, {}),
    "attention_core": ({"mode": "selective"}, {}),
    "mlp_activation": ({"mode": "selective", "modules": ["mlp_activation"]}, {}),
    "norm": ({"mode": "selective", "modules": ["norm"]}, {}),
    "all modules": ({"mode": "selective", "modules": ALL_MODULES}, {}),
    "full": ({"mode": "full"}, {}),
    "full, first layer": ({"mode": "full", "layers": 1}, {}),
    "full, every other layer": ({"mode": "full", "every": 2}, {}),
    "full, first micro-batch kept": ({"mode": "full", "keep_micro_batches": 1}, {}),
    "full, partitioned": ({"mode": "full"}, P_A),
    "full, on the host": ({"mode": "full"}, CPU),
    "full, partitioned on the host": ({"mode": "full"}, P_A | CPU),
    "full, contiguous": ({"mode": "full"}, CONTIGUOUS),
    "full, every other layer, contiguous": ({"mode": "full", "every": 2}, CONTIGUOUS),
    "full, first layer, first micro-batch kept, contiguous": (
        {"mode": "full", "layers": 1, "keep_micro_batches": 1},
        CONTIGUOUS,
    ),
    "full, partitioned, contiguous on the host": (
        {"mode": "full"},
        P_A | CONTIGUOUS | CPU | {"number_checkpoints": 4},
    ),
}


def model_of(kind: str, dropout: float) -> PretrainedConfig:
    """A small model's config; `bert` norms the sums, after the dropouts of what is added."""
    if kind != "gpt2":
        places = ("hidden_dropout_prob", "attention_probs_dropout_prob")
        fields = bert_fields(model_type=kind, num_hidden_layers=3, **dict.fromkeys(places, dropout))
        return AutoConfig.for_model(
            **fields | {"max_position_embeddings": SEQUENCE, "pad_token_id": 0}
        )
    return gpt2_config(dropout, n_layer=3, vocab_size=101, n_positions=SEQUENCE)


def batches(config: PretrainedConfig, topology: Topology, seed: int) -> list[Any]:
    """This rank's micro-batches of a step."""

    def own(rows: Tensor) -> tuple[Tensor, ...]:
        return rows.chunk(topology.data)[topology.data_rank].chunk(ACCUMULATION)

    if config.model_type == "gpt2":
        generator = torch.Generator().manual_seed(seed)
        windows = torch.randint(0, config.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
        return [(window[:, :-1], window[:, 1:]) for window in own(windows)]
    parts = {
        name: own(rows) for name, rows in rows_for(vars(config), seed, BATCH, SEQUENCE).items()
    }
    return [
        MaskedBatch({name: part[number] for name, part in parts.items()})
        for number in range(ACCUMULATION)
    ]


def engine_of(
    config: PretrainedConfig, topology: Topology, seed: int, name: str, stage: int
) -> Any:
    from zero_tp.engine.engine import TrainingEngine

    policy, settings = POLICIES[name]
    deepspeed_config = deepspeed_settings(
        stage,
        micro_batch=BATCH // topology.data // ACCUMULATION,
        accumulation=ACCUMULATION,
        gradient_clipping=0.5,
        optimizer={
            "type": "AdamW",
            "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
        },
        activation_checkpointing=settings,
    )
    return TrainingEngine.from_dict(
        config, topology, deepspeed_config, seed=seed, recompute=RecomputePolicy(**policy)
    )


def run(kind: str, seed: int, tensor: int, sequence: bool, stage: int) -> dict[str, Any]:
    """On every rank: each policy's losses, norms, weights and notes."""
    from tests.support.native import native_tensors

    config = model_of(kind, dropout=0.2)
    config._attn_implementation = ("sdpa", "eager")[seed % 2]
    topology = Topology(tensor, sequence)
    found = {}
    for name in POLICIES:
        engine = engine_of(config, topology, seed, name, stage)
        losses, norms = [], []
        for step in range(STEPS):
            losses.append(engine.train_step(batches(config, topology, seed + step)))
            norms.append(engine.gradient_norm)
        weights: dict[str, Tensor] = {
            key: tensor.clone() for key, tensor in native_tensors(engine.model)
        }
        found[name] = (losses, norms, weights, engine.activations.notes)
    return found


def flops_of_a_step(seed: int, tensor: int, sequence: bool) -> dict[str, tuple[float, float]]:
    """Return each policy's FLOPs of one step by the library, and by torch's counter on this
    rank.
    """
    from torch.utils.flop_counter import FlopCounterMode

    from zero_tp.model.flops import hardware_flops

    config = model_of("gpt2", dropout=0.0)
    config.vocab_size = 100  # the library counts no padding
    config._attn_implementation = "eager"  # torch counts no fused kernel of a CPU
    topology = Topology(tensor, sequence)
    found = {}
    for name in (name for name, (_, settings) in POLICIES.items() if not settings):
        engine = engine_of(config, topology, seed, name, stage=0)
        with FlopCounterMode(display=False) as ran:
            engine.train_step(batches(config, topology, seed))
        policy = RecomputePolicy(**POLICIES[name][0])
        again = policy.recomputed_layers_and_cores(config.n_layer, ACCUMULATION)
        said = hardware_flops(engine.model.spec, BATCH, SEQUENCE, recomputed=again)
        found[name] = (said, float(ran.get_total_flops()))
    return found


@THOROUGH
@pytest.mark.parametrize(
    ("tensor", "sequence"), in_tiers([(1, False), (2, False), (2, True)], [(2, True)])
)
def test_hardware_flops_equal_torchs_count(
    ranks: Pools, seed: int, tensor: int, sequence: bool
) -> None:
    every = ranks(2).run(flops_of_a_step, seed, tensor, sequence)
    for name in every[0]:
        assert sum(ran[name][1] for ran in every) == every[0][name][0], name


@EACH_STAGE
@THOROUGH
@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True)])
def test_recomputing_changes_no_bit(
    ranks: Pools, seed: int, tensor: int, sequence: bool, stage: int
) -> None:
    compare(ranks, "gpt2", seed, tensor, sequence, stage)


@pytest.mark.thorough
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["bert", "megatron-bert"])
def test_recomputing_an_encoder_changes_no_bit(
    ranks: Pools, seed: int, kind: str, sequence: bool
) -> None:
    compare(ranks, kind, seed, 2, sequence, 2)


@pytest.mark.parametrize("name", ["attention_core", "all modules", "full"])
def test_frozen_layers_have_no_gradients_to_recompute(name: str) -> None:
    def gradients(name: str) -> dict[str, Any]:
        model = ZeroTPForCausalLM(model_of("gpt2", dropout=0.0), grid(1, False), seed=1).train()
        for parameter, values in model.named_parameters():
            values.requires_grad_("layers.2" in parameter or "final" in parameter)
        ActivationMemory(
            model,
            RecomputePolicy(**POLICIES[name][0]),
            ActivationCheckpointing(),
            torch.device("cpu"),
        )
        tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
        model(tokens, labels=tokens).loss.backward()
        return {name: values.grad for name, values in model.named_parameters()}

    found, expected = gradients(name), gradients("none")
    trained = {name: gradient for name, gradient in expected.items() if gradient is not None}
    assert 0 < len(trained) < len(expected)
    assert all(torch.equal(found.pop(name), gradient) for name, gradient in trained.items())
    assert not any(gradient is not None for gradient in found.values())


def test_a_policy_for_more_layers_than_there_are_is_refused() -> None:
    model = ZeroTPForCausalLM(model_of("gpt2", dropout=0.0), grid(1, False), device="meta")
    with pytest.raises(
        UserError, match=r"^zero_tp\.recompute\.layers: 4, but the model has 3; use a smaller one"
    ):
        ActivationMemory(
            model,
            RecomputePolicy(mode="full", layers=4),
            ActivationCheckpointing(),
            torch.device("cpu"),
        )


def test_a_part_that_is_named_twice_is_recomputed_once() -> None:
    model = ZeroTPForCausalLM(model_of("gpt2", dropout=0.0), grid(1, False), device="meta")
    policy = RecomputePolicy(mode="selective", modules=["norm", "attention_core", "norm"])
    assert policy.chosen_modules == ("norm", "attention_core")
    memory = ActivationMemory(model, policy, ActivationCheckpointing(), torch.device("cpu"))
    assert any("forward" in vars(module) for module in model.modules())
    memory.remove()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["attention_core", "all modules", "full, contiguous"])
def test_a_deep_copy_recomputes_its_own_layers(name: str) -> None:
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    plain, model = (
        ZeroTPForCausalLM(model_of("gpt2", dropout=0.0), grid(1, False), seed=1) for _ in range(2)
    )
    policy, settings = POLICIES[name]
    ActivationMemory(
        model, RecomputePolicy(**policy), ActivationCheckpointing(**settings), torch.device("cpu")
    )
    copied = copy.deepcopy(model)
    for changed in (plain, copied):
        for parameter in changed.parameters():
            parameter.data.mul_(2)
        changed(tokens, labels=tokens).loss.backward()
    for (key, expected), found in zip(plain.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(gradient_of(found), gradient_of(expected)), key
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_someone_has_replaced_still_runs() -> None:
    tokens = torch.arange(2 * SEQUENCE).view(2, SEQUENCE)
    model: Any = ZeroTPForCausalLM(model_of("gpt2", dropout=0.0), grid(1, False), seed=1)
    layer = model.transformer.layers[0]
    layer.forward = replaced = mock.Mock(wraps=layer.forward)
    memory = ActivationMemory(
        model, RecomputePolicy(mode="full"), ActivationCheckpointing(), torch.device("cpu")
    )
    model(tokens, labels=tokens).loss.backward()
    assert replaced.call_count == 2  # again in backward
    memory.remove()
    assert layer.forward is replaced
    model(tokens, labels=tokens).loss.backward()
    assert replaced.call_count == 3


def compare(ranks: Pools, kind: str, seed: int, tensor: int, sequence: bool, stage: int) -> None:
    """Compare every policy with "none", with dropout: backward replays the masks."""
    for found in ranks(2).run(run, kind, seed, tensor, sequence, stage):
        losses, norms, weights, _ = found["none"]
        for name, (its_losses, its_norms, its_weights, notes) in found.items():
            assert its_losses == losses and its_norms == norms, name
            for key, expected in weights.items():
                assert torch.equal(its_weights[key], expected), (name, key)
            noted = "nothing to partition" in " ".join(notes)
            assert noted == ("partitioned" in name and (sequence or tensor == 1))
