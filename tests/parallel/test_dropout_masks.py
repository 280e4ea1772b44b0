"""The dropout masks themselves, drawn in forward and again by recomputation.

test_random.py has the streams and the masks of a plain forward; here backward draws too, and steps follow one another.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.tiers import in_tiers
from zero_tp.activations.activation_memory import ActivationMemory
from zero_tp.activations.policy import RecomputePolicy
from zero_tp.huggingface import ZeroTPForCausalLM

LAYERS, LENGTH, BATCH = 3, 16, 2
# Different ones, so that a mask tells which of them it was drawn with.
EMBEDDING, RESIDUAL, ATTENTION = 0.15, 0.3, 0.5
CONFIG: dict[str, Any] = {
    "n_layer": LAYERS,
    "n_head": 4,
    "n_embd": 64,
    "n_positions": LENGTH,
    "vocab_size": 50,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "embd_pdrop": EMBEDDING,
    "resid_pdrop": RESIDUAL,
    "attn_pdrop": ATTENTION,
}

# A forward draws the embedding's mask, then each layer's: attention, residual, residual.
KINDS = ["embedding", *["attention", "residual", "residual"] * LAYERS]
FULL = [number for layer in reversed(range(LAYERS)) for number in range(1 + 3 * layer, 4 + 3 * layer)]
CORES = [1 + 3 * layer for layer in reversed(range(LAYERS))]

P_A = {"partition_activations": True}
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    # Which masks of the forward are drawn again, in backward's order.
    "none": ({"mode": "none"}, {}, []),
    "selective": ({"mode": "selective"}, {}, CORES),
    "all modules": (
        {"mode": "selective", "modules": ["attention_core", "mlp_activation", "norm"]},
        {},
        CORES,
    ),
    "full": ({"mode": "full"}, {}, FULL),
    "full, every other layer": ({"mode": "full", "every": 2}, {}, [n for n in FULL if (n - 1) // 3 != 1]),
    "full, partitioned": ({"mode": "full"}, P_A, FULL),
    "full, contiguous": ({"mode": "full"}, {"contiguous_memory_optimization": True, "number_checkpoints": 6}, FULL),
}


class Masks(TorchDispatchMode):
    """The masks that are drawn inside, in order: by native_dropout, or by the maths of attention on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.native_dropout.default:
            self.drawn.append(result[1].clone())
        elif function is torch.ops.aten.bernoulli_.float:
            self.drawn.append(result.bool())
        return result

    def take(self) -> list[Tensor]:
        drawn, self.drawn = self.drawn, []
        return drawn


def model_of(tensor: int, sequence: bool, attention: str, policy: str) -> ZeroTPForCausalLM:
    config = GPT2Config(**CONFIG)
    config._attn_implementation = attention
    model: Any = ZeroTPForCausalLM(config, grid(tensor, sequence), seed=11).train()
    mode, settings, _ = POLICIES[policy]
    ActivationMemory(model, RecomputePolicy(**mode), settings, torch.device("cpu"))
    return model


def drawn_by(policy: str, tensor: int, sequence: bool, attention: str) -> list[list[Tensor]]:
    """Masks of: forward, backward; then forward, forward, backward of the second, of the first; forward."""
    model = model_of(tensor, sequence, attention, policy)
    tokens = torch.randint(50, (BATCH, LENGTH))
    phases = []
    with Masks() as masks:
        first = model(tokens, labels=tokens).loss
        phases.append(masks.take())
        first.backward()
        phases.append(masks.take())
        second = model(tokens, labels=tokens).loss
        phases.append(masks.take())
        third = model(tokens, labels=tokens).loss
        phases.append(masks.take())
        third.backward()
        phases.append(masks.take())
        second.backward()
        phases.append(masks.take())
        model(tokens, labels=tokens)
        phases.append(masks.take())
    return phases


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize(
    ("attention", "sequence"),
    in_tiers([("eager", False), ("eager", True), ("sdpa", False), ("sdpa", True)], [("eager", True)]),
)
@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "none"])
def test_recomputation_replays_the_masks(ranks: Pools, policy: str, attention: str, sequence: bool) -> None:
    again = POLICIES[policy][2]
    plain = ranks(2).run(drawn_by, "none", 2, sequence, attention)
    for phases, expected in zip(ranks(2).run(drawn_by, policy, 2, sequence, attention), plain, strict=True):
        # Forwards draw what they draw without recomputation: a replay has moved no stream.
        first, replay, second, third, replay_of_third, replay_of_second, fourth = phases
        for number, forward in zip((0, 2, 3, 6), (first, second, third, fourth), strict=True):
            assert len(forward) == len(KINDS) and same(forward, expected[number]), f"forward of phase {number}"
        assert not expected[1] and not expected[4] and not expected[5]
        assert same(replay, [first[number] for number in again])
        assert same(replay_of_third, [third[number] for number in again])
        assert same(replay_of_second, [second[number] for number in again])


def masks_on_a_grid(tensor: int, sequence: bool, attention: str) -> tuple[int, int, list[Tensor], list[Tensor]]:
    topology = grid(tensor, sequence)
    forward, replay, *_ = drawn_by("full", tensor, sequence, attention)
    return topology.tensor_rank, topology.data_rank, forward, replay


@pytest.mark.parametrize(
    ("tensor", "sequence"), in_tiers([(2, False), (2, True), (4, False), (4, True)], [(4, False), (4, True)])
)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_who_shares_which_masks(ranks: Pools, tensor: int, sequence: bool, attention: str) -> None:
    """In the replay too; test_random.py has an eager forward."""
    found = {
        (t, d): (forward, replay)
        for t, d, forward, replay in ranks(4).run(masks_on_a_grid, tensor, sequence, attention)
    }
    for one, other in combinations(sorted(found), 2):
        for kinds, mine, others in zip(
            (KINDS, [KINDS[number] for number in FULL]), found[one], found[other], strict=True
        ):
            assert len(kinds) == len(mine) == len(others)
            for kind, mask, theirs in zip(kinds, mine, others, strict=True):
                repeated = one[1] == other[1] and not sequence and kind != "attention"
                assert torch.equal(mask, theirs) == repeated, (one, other, kind)


def shares_kept(attention: str) -> dict[str, float]:
    forwards = drawn_by("none", 2, True, attention)
    kept: dict[str, list[Tensor]] = {}
    for number in (0, 2, 3, 6):
        for kind, mask in zip(KINDS, forwards[number], strict=True):
            kept.setdefault(kind, []).append(mask.flatten().float())
    return {kind: torch.cat(masks).mean().item() for kind, masks in kept.items()}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_dropout_has_its_own_probability(ranks: Pools, attention: str) -> None:
    for found in ranks(2).run(shares_kept, attention):
        # At least 4096 elements each: 0.03 are four standard deviations.
        assert found["embedding"] == pytest.approx(1 - EMBEDDING, abs=0.03)
        assert found["residual"] == pytest.approx(1 - RESIDUAL, abs=0.03)
        assert found["attention"] == pytest.approx(1 - ATTENTION, abs=0.03)


def masks_of_steps(stage: int, policy: str) -> list[Tensor]:
    """All masks of two steps of two micro-batches through the engine, in order."""
    from zero_tp.training.engine import TrainingEngine

    topology = grid(2, True)
    mode, activations, _ = POLICIES[policy]
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "activation_checkpointing": activations,
    }
    config = GPT2Config(**CONFIG)
    config._attn_implementation = "eager"
    engine = TrainingEngine(config, topology, settings, seed=11, recompute=RecomputePolicy(**mode))
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.long)  # the same everywhere: only the streams tell masks apart
    with Masks() as masks:
        for _ in range(2):
            engine.train_step([(tokens, tokens)] * 2)
            engine.evaluate([(tokens, tokens)])
    return masks.take()


@pytest.mark.parametrize("stage", in_tiers([0, 3], [3]))
def test_no_layer_micro_batch_or_step_draws_a_mask_of_another(ranks: Pools, stage: int) -> None:
    plain = ranks(2).run(masks_of_steps, stage, "none")
    everyone = [mask for masks in plain for mask in masks]
    assert len(everyone) == 2 * 4 * len(KINDS)
    for one, other in combinations(everyone, 2):
        assert one.shape != other.shape or not torch.equal(one, other)
    for masks, expected in zip(ranks(2).run(masks_of_steps, stage, "full"), plain, strict=True):
        each = len(KINDS) + len(FULL)
        for number in range(4):
            forward = expected[number * len(KINDS) :][: len(KINDS)]
            assert same(masks[number * each :][:each], forward + [forward[index] for index in FULL])
