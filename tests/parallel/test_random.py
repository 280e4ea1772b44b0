"""Dropout masks: which ranks draw the same, which draw different ones."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GPT2Config

from tests.support.compare import grid
from tests.support.pools import Pools
from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.random import PER_RANK, SHARED, Dropout, RandomStreams
from zero_tp.topology import Topology

LAYERS = 2
SIZES: dict[str, Any] = {"n_layer": LAYERS, "n_head": 4, "n_embd": 32, "n_positions": 16, "vocab_size": 50}
DROPOUT: dict[str, Any] = {"embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.5}

# Dropouts of one forward in order: embedding, then attention, residual, residual of each layer.
ATTENTION = [1, 4]
STREAM = [0, 2, 3, 5, 6]


def dropout_masks(model: ZeroTPForCausalLM, tokens: Tensor) -> list[Tensor]:
    """The masks that a forward of an eager model draws, in order."""
    masks: list[Tensor] = []
    native = torch.native_dropout

    def recorded(*args: Any) -> tuple[Tensor, Tensor]:
        output, mask = native(*args)
        masks.append(mask)
        return output, mask

    with patch.object(torch, "native_dropout", recorded):
        model(tokens, labels=tokens)
    return masks


def masks_of_each_rank(tensor: int, sequence: bool) -> tuple[int, int, list[Tensor]]:
    topology = grid(tensor, sequence)
    config = GPT2Config(**SIZES, **DROPOUT)
    config._attn_implementation = "eager"
    model = ZeroTPForCausalLM(config, topology, seed=11).train()
    tokens = torch.ones(2, 16, dtype=torch.long)
    before = torch.get_rng_state()
    first, second = dropout_masks(model, tokens), dropout_masks(model, tokens)
    assert torch.equal(torch.get_rng_state(), before), "a forward moved the default generator"
    assert len(first) == 1 + 3 * LAYERS
    masks = first + second
    for index, mask in enumerate(masks):
        assert 0.35 < mask.float().mean() < 0.65
        for other in masks[index + 1 :]:
            assert mask.shape != other.shape or not torch.equal(mask, other), "a mask was drawn twice"
    again = ZeroTPForCausalLM(config, topology, seed=11).train()
    assert all(map(torch.equal, dropout_masks(again, tokens), first)), "the seed does not give the masks"
    return topology.tensor_rank, topology.data_rank, first


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_over_a_grid(ranks: Pools, sequence: bool) -> None:
    found = {(t, d): masks for t, d, masks in ranks(4).run(masks_of_each_rank, 2, sequence)}
    assert len(found) == 4
    for one, masks in found.items():
        for other, others in found.items():
            if one >= other:
                continue
            same_data = one[1] == other[1]
            for index, (mask, of_other) in enumerate(zip(masks, others, strict=True)):
                repeated = same_data and not sequence and index in STREAM
                assert torch.equal(mask, of_other) == repeated, (one, other, index)
    assert found[0, 0][0].shape == (8 if sequence else 16, 2, 32)
    assert found[0, 0][ATTENTION[0]].shape == (2, 2, 16, 16)


def fused_attention(tensor: int) -> tuple[Tensor, Tensor]:
    """The outputs of the first layer's attention through scaled_dot_product_attention, from equal inputs."""
    topology = grid(tensor, False)
    model: Any = ZeroTPForCausalLM(GPT2Config(**SIZES, **DROPOUT), topology, seed=11).train()
    core = model.transformer.layers[0].attention.core
    query = torch.ones(1, 2, 16, 8)
    before = torch.get_rng_state()
    first, second = core(query, query, query, None), core(query, query, query, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    core.eval()
    assert torch.equal(core(query, query, query, None), F.scaled_dot_product_attention(query, query, query))
    return first, second


def test_fused_attention_draws_from_the_rank_s_own_stream(ranks: Pools) -> None:
    outputs = [first for first, _ in ranks(4).run(fused_attention, 2)]
    for index, one in enumerate(outputs):
        assert not any(torch.equal(one, other) for other in outputs[index + 1 :])


def test_streams_are_restored() -> None:
    streams = RandomStreams(Topology(2, world=4, rank=3), 5)
    dropouts = {name: Dropout(0.5, streams, name) for name in (SHARED, PER_RANK)}

    def draw() -> list[Tensor]:
        return [dropouts[name](torch.ones(64)) for name in (SHARED, PER_RANK, SHARED)]

    draw()
    saved = streams.state_dict()
    expected = draw()
    assert not any(map(torch.equal, draw(), expected))
    streams.load_state_dict(saved)
    assert all(map(torch.equal, draw(), expected))
    # What was saved is a copy, and so is what was loaded.
    streams.load_state_dict(saved)
    assert all(map(torch.equal, draw(), expected))
    other = RandomStreams(Topology(2, world=4, rank=3), 6)
    other.load_state_dict(saved)
    dropouts = {name: Dropout(0.5, other, name) for name in (SHARED, PER_RANK)}
    assert all(map(torch.equal, draw(), expected))


def test_the_default_generator_is_restored_after_an_error() -> None:
    streams = RandomStreams(Topology(), 5)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError), streams.use(SHARED):
        torch.rand(3)
        raise ArithmeticError
    assert torch.equal(torch.get_rng_state(), before)


def test_seeding_the_default_generator_does_not_move_the_streams() -> None:
    def draw() -> Tensor:
        streams = RandomStreams(Topology(), 5)
        return Dropout(0.5, streams, SHARED)(torch.ones(64))

    torch.manual_seed(1)
    one = draw()
    torch.manual_seed(2)
    assert torch.equal(one, draw())


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False)])
def test_no_dropout_draws_nothing(p: float, training: bool) -> None:
    streams = RandomStreams(Topology(), 5)
    saved = streams.state_dict()
    tensor = torch.ones(8)
    assert Dropout(p, streams, SHARED).train(training)(tensor) is tensor
    assert all(torch.equal(state, saved[name]) for name, state in streams.state_dict().items())


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_what_is_kept_is_scaled(p: float) -> None:
    dropped = Dropout(p, RandomStreams(Topology(), 5), PER_RANK)(torch.ones(20_000))
    kept = dropped[dropped != 0]
    assert torch.allclose(kept, torch.tensor(1 / (1 - p)))
    assert len(kept) / len(dropped) == pytest.approx(1 - p, abs=0.02)
