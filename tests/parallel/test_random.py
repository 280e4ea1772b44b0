"""Random streams: their draws, the dropout masks of each rank, and their replay in backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config

from tests.support.compare import grid
from tests.support.pools import Pools
from tests.support.random_draws import OUTSIDE, draw_as_a_run, same
from tests.support.settings import deepspeed_settings, gpt2_config
from tests.tiers import in_tiers
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
from zero_tp.parallel.random import PER_RANK, SHARED, Dropout, RandomStreams
from zero_tp.parallel.topology import Topology
from zero_tp.run.checkpoint.manifest import states_file
from zero_tp.run.checkpoint.reader import RANDOM
from zero_tp.run.checkpoint.start_point import _restore_streams

# ---- streams -------------------------------------------------------------------------------------

CPUGenerator = torch.Generator


class CUDAGenerator:
    """torch 2.13's `torch.Generator` of a CUDA device: a pointer to a state
    (ATen/cuda/CUDAGeneratorImpl.h).

    Attributes:
        copies: of states, by all generators.
    """

    device = torch.device("cuda", 0)
    copies = 0

    def __init__(self, device: torch.device = device, state: torch.Generator | None = None) -> None:
        assert device.type == "cuda"
        self.state = state or CPUGenerator()

    def manual_seed(self, seed: int) -> CUDAGenerator:
        self.state.manual_seed(seed)
        return self

    def get_state(self) -> Tensor:
        CUDAGenerator.copies += 1
        return self.state.get_state()

    def set_state(self, state: Tensor) -> None:
        CUDAGenerator.copies += 1
        self.state.set_state(state)

    def clone_state(self) -> CUDAGenerator:
        CUDAGenerator.copies += 1
        return CUDAGenerator(state=self.state.clone_state())

    def graphsafe_get_state(self) -> CUDAGenerator:
        return CUDAGenerator(state=self.state)

    def graphsafe_set_state(self, other: CUDAGenerator) -> None:
        self.state = other.state


def test_streams_and_the_default_generator_are_independent() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = [torch.rand(3) for _ in range(OUTSIDE)]
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            found.append(
                draw_as_a_run(RandomStreams(Topology(2, world=4, rank=3), 5), lambda: torch.rand(3))
            )
    assert same(found[0][:OUTSIDE], plain)
    assert same(found[0][OUTSIDE:], found[1][OUTSIDE:])


def test_a_cuda_stream_is_used_without_copies() -> None:
    """Its draws are those of a copied state. A class with the interface of a CUDA generator
    stands in for it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(1)
        expected = draw_as_a_run(RandomStreams(Topology(), 5), lambda: torch.rand(3))
    default = CUDAGenerator().manual_seed(1)
    with (
        mock.patch.object(torch, "Generator", CUDAGenerator),
        mock.patch.object(torch.cuda, "current_device", lambda: 0),
        mock.patch.object(torch.cuda, "default_generators", (default,)),
    ):
        streams = RandomStreams(Topology(), 5, "cuda")
        found = draw_as_a_run(streams, lambda: torch.rand(3, generator=default.state))
        before = CUDAGenerator.copies
        with streams.use(SHARED):
            assert CUDAGenerator.copies == before
        assert CUDAGenerator.copies == before
    assert same(found, expected)
    assert list(streams.state_dict()) == [SHARED, PER_RANK]


@pytest.mark.parametrize("size", [5056, 16])
def test_a_resumed_run_takes_new_streams_on_another_kind_of_device(
    tmp_path: Path, size: int
) -> None:
    """A state of the CPU's generator has 5,056 bytes, one of CUDA's 16."""
    saved = RandomStreams(Topology(), 5)
    states = {
        f"{RANDOM}/{name}": state[:size].clone() for name, state in saved.state_dict().items()
    }
    save_file(states, tmp_path / states_file(0, 0))
    streams = RandomStreams(Topology(), 6)
    engine: Any = SimpleNamespace(topology=Topology(), model=SimpleNamespace(streams=streams))
    manifest: Any = SimpleNamespace(tensor=1, data=1, sequence=False, step=3, imported=None)
    _restore_streams(engine, tmp_path, manifest, 7)
    expected = saved if size == 5056 else RandomStreams(Topology(), 7 + 3)
    for name, state in streams.state_dict().items():
        assert torch.equal(state, expected.state_dict()[name])


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_no_dropout_draws_nothing(p: float, training: bool) -> None:
    streams = RandomStreams(Topology(), 5)
    saved = streams.state_dict()
    tensor = torch.ones(8)
    assert Dropout(p, streams, SHARED).train(training)(tensor) is tensor
    assert all(torch.equal(state, saved[name]) for name, state in streams.state_dict().items())


LAYERS, LENGTH, BATCH = 3, 16, 2
# Different ones, so that a mask tells which of them it was drawn with.
EMBEDDING, RESIDUAL, ATTENTION = 0.15, 0.3, 0.5
DROPOUTS = {"embd_pdrop": EMBEDDING, "resid_pdrop": RESIDUAL, "attn_pdrop": ATTENTION}

# A forward draws the embedding's mask, then each layer's: attention, residual, residual.
KINDS = ["embedding", *["attention", "residual", "residual"] * LAYERS]
FULL = [
    number for layer in reversed(range(LAYERS)) for number in range(1 + 3 * layer, 4 + 3 * layer)
]
CORES = [1 + 3 * layer for layer in reversed(range(LAYERS))]

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
    "full, every other layer": (
        {"mode": "full", "every": 2},
        {},
        [n for n in FULL if (n - 1) // 3 != 1],
    ),
    "full, partitioned": ({"mode": "full"}, {"partition_activations": True}, FULL),
    "full, contiguous": (
        {"mode": "full"},
        {"contiguous_memory_optimization": True, "number_checkpoints": 6},
        FULL,
    ),
}


class Masks(TorchDispatchMode):
    """The masks that are drawn inside, in order: by native_dropout, or by the maths of attention
    on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.native_dropout.default:
            self.drawn.append(result[1].clone())
        elif function is torch.ops.aten.bernoulli_.float:
            self.drawn.append(result.bool())
        return result

    def take(self) -> list[Tensor]:
        draw_as_a_run, self.drawn = self.drawn, []
        return draw_as_a_run


def config_of(attention: str) -> GPT2Config:
    config = gpt2_config(n_layer=LAYERS, n_embd=64, n_positions=LENGTH, vocab_size=50, **DROPOUTS)
    config._attn_implementation = attention
    return config


def model_of(tensor: int, sequence: bool, attention: str, policy: str) -> ZeroTPForCausalLM:
    model: Any = ZeroTPForCausalLM(config_of(attention), grid(tensor, sequence), seed=11).train()
    mode, settings, _ = POLICIES[policy]
    ActivationMemory(
        model, RecomputePolicy(**mode), ActivationCheckpointing(**settings), torch.device("cpu")
    )
    return model


def drawn_by(policy: str, tensor: int, sequence: bool, attention: str) -> list[list[Tensor]]:
    """Return the masks of each phase: forward, backward; two forwards, their backwards in
    reverse order; forward.
    """
    model = model_of(tensor, sequence, attention, policy)
    tokens = torch.randint(50, (BATCH, LENGTH))
    before = torch.get_rng_state()
    phases, losses = [], []
    with Masks() as masks:
        for backward_of in (None, 0, None, None, 2, 1, None):
            if backward_of is None:
                losses.append(model(tokens, labels=tokens).loss)
            else:
                losses[backward_of].backward()
            phases.append(masks.take())
    assert torch.equal(torch.get_rng_state(), before), "the default generator has moved"
    return phases


@pytest.fixture(scope="module")
def masks_without_recomputation(ranks: Pools) -> Callable[[str, bool], list[list[list[Tensor]]]]:
    """`masks_without_recomputation(attention, sequence)`: by rank and phase, drawn once."""
    return functools.cache(
        lambda attention, sequence: ranks(2).run(drawn_by, "none", 2, sequence, attention)
    )


@pytest.mark.parametrize(
    ("attention", "sequence"),
    in_tiers(
        [("eager", False), ("eager", True), ("sdpa", False), ("sdpa", True)], [("eager", True)]
    ),
)
@pytest.mark.parametrize(
    "policy",
    in_tiers(
        [name for name in POLICIES if name != "none"],
        ["all modules", "full, every other layer", "full, contiguous"],
    ),
)
def test_recomputation_replays_the_masks(
    ranks: Pools, masks_without_recomputation: Any, policy: str, attention: str, sequence: bool
) -> None:
    again = POLICIES[policy][2]
    plain = masks_without_recomputation(attention, sequence)
    for phases, expected in zip(
        ranks(2).run(drawn_by, policy, 2, sequence, attention), plain, strict=True
    ):
        # Forwards draw what they draw without recomputation: a replay has moved no stream.
        first, replay, second, third, replay_of_third, replay_of_second, fourth = phases
        for number, forward in zip((0, 2, 3, 6), (first, second, third, fourth), strict=True):
            assert len(forward) == len(KINDS) and same(forward, expected[number]), (
                f"forward of phase {number}"
            )
        assert not expected[1] and not expected[4] and not expected[5]
        assert same(replay, [first[number] for number in again])
        assert same(replay_of_third, [third[number] for number in again])
        assert same(replay_of_second, [second[number] for number in again])


def masks_on_a_grid(
    tensor: int, sequence: bool, attention: str
) -> tuple[int, int, list[Tensor], list[Tensor]]:
    topology = grid(tensor, sequence)
    forward, replay, *_ = drawn_by("full", tensor, sequence, attention)
    return topology.tensor_rank, topology.data_rank, forward, replay


ON_A_GRID = list(product(["eager", "sdpa"], [2, 4], [False, True]))


@pytest.mark.parametrize(
    ("attention", "tensor", "sequence"),
    in_tiers(ON_A_GRID, [("sdpa", 2, False), ("eager", 2, True)]),
)
def test_masks_over_a_grid(ranks: Pools, attention: str, tensor: int, sequence: bool) -> None:
    """In forward and replay only TP ranks share masks, those of whole tensors: residual dropout
    without SP.
    """
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
        expected = {
            "embedding": 1 - EMBEDDING,
            "residual": 1 - RESIDUAL,
            "attention": 1 - ATTENTION,
        }
        assert found == pytest.approx(expected, abs=0.03)


def masks_of_steps(stage: int, policy: str) -> list[Tensor]:
    """All masks of two steps of two micro-batches through the engine, in order."""
    from zero_tp.engine.engine import TrainingEngine

    mode, activations, _ = POLICIES[policy]
    settings = deepspeed_settings(
        stage, micro_batch=BATCH, accumulation=2, activation_checkpointing=activations
    )
    recompute = RecomputePolicy(**mode)
    engine = TrainingEngine.from_dict(
        config_of("eager"), grid(2, True), settings, seed=11, recompute=recompute
    )
    # The same everywhere: only the streams tell masks apart.
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.long)
    with Masks() as masks:
        for _ in range(2):
            engine.train_step([(tokens, tokens)] * 2)
            engine.evaluate([(tokens, tokens)])
    return masks.take()


@pytest.mark.thorough
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
