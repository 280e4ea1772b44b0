"""ZeroTPForCausalLM against GPT2LMHeadModel in one process: a bare backward, no DeepSpeed."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from tests.support.compare import check_close, grid
from tests.support.gpt2_reference import BATCH, LENGTH, SIZES, reference_model, same_as_native
from tests.support.native import parallel_model
from tests.support.pools import Pools
from zero_tp.base.errors import UserError
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.random import SHARED, RandomStreams
from zero_tp.parallel.topology import Topology

EACH_GRID = pytest.mark.parametrize(
    ("world", "sequence"), [(world, sequence) for world in (2, 4) for sequence in (False, True)]
)


@EACH_GRID
@pytest.mark.parametrize("padding", ["", "right"])
def test_loss_logits_and_every_gradient(
    ranks: Pools, world: int, sequence: bool, padding: str
) -> None:
    gradients = 12 * SIZES["n_layer"] + 4
    assert ranks(world).run(same_as_native, world, sequence, padding, {}) == [gradients] * world


@pytest.mark.parametrize(
    ("padding", "changes"),
    [
        ("left", {}),
        ("left", {"attention": "eager"}),
        ("right, labels kept", {}),
        ("right", {"attention": "eager"}),
        ("", {"attention": "eager"}),
        ("", {"n_head": 8, "vocab_size": 3}),  # with TP 4 a rank that holds padding only
        ("", {"n_layer": 3, "n_head": 24, "layer_norm_epsilon": 0.1}),
    ],
)
def test_fields_of_the_config(ranks: Pools, padding: str, changes: dict[str, Any]) -> None:
    world = 4 if "vocab_size" in changes else 2
    gradients = 12 * changes.get("n_layer", SIZES["n_layer"]) + 4
    assert ranks(world).run(same_as_native, world, True, padding, changes) == [gradients] * world


# ---- lengths and ids -----------------------------------------------------------------------------


def uneven_lengths(world: int) -> str:
    topology = grid(world, True)
    reference = reference_model()
    model = parallel_model(reference, topology).eval()
    for length in (1, world - 1, 2 * world + 1, LENGTH):
        tokens = torch.randint(SIZES["vocab_size"], (BATCH, length))
        with torch.no_grad():
            found, expected = model(tokens).logits, reference(tokens).logits
            losses = model(tokens, labels=tokens, reduction="none").loss
            if length > 1:
                mean = model(tokens, labels=tokens).loss.item()
                assert mean == pytest.approx(reference(tokens, labels=tokens).loss.item(), rel=1e-5)
        assert losses.shape == tokens.shape
        check_close({"logits": found}, {"logits": expected})
    tokens = tokens[:, : world + 1]
    with pytest.raises(UserError) as caught:
        model(tokens, labels=tokens)
    return str(caught.value)


@pytest.mark.parametrize("world", [2, 4])
def test_lengths_that_do_not_divide(ranks: Pools, world: int) -> None:
    for said in ranks(world).run(uneven_lengths, world):
        assert re.match(f"sequence length {world + 1} does not divide by .* {world}", said), said


def refusals(world: int, sequence: bool) -> int:
    model = parallel_model(reference_model(), grid(world, sequence))
    good = torch.zeros(1, 8, dtype=torch.long)

    def changed(to: int) -> Tensor:
        tokens = good.clone()
        tokens[0, 3] = to
        return tokens

    # 61 is in the padding of TP 2 and 4, 100 past it; both would silently be zeros.
    for wrong in (-1, 61, 100):
        with pytest.raises((RuntimeError, IndexError), match="token ids must be in"):
            model(changed(wrong))
        with pytest.raises((RuntimeError, IndexError), match="labels must be in"):
            model(good, labels=changed(wrong))
    assert model(good, labels=changed(-100)).loss.isfinite()
    with pytest.raises(UserError, match="sequence length 25 exceeds the model's 24 positions"):
        model(torch.zeros(1, 25, dtype=torch.long))
    with pytest.raises(ValueError, match="reduction 'sum'"):
        model(good, labels=good, reduction="sum")
    with pytest.raises(ValueError, match=r"labels are \(1, 4\), input ids \(1, 8\)"):
        model(good, shift_labels=good[:, :4])
    return 1


@pytest.mark.parametrize("sequence", [False, True])
def test_what_would_be_silently_wrong_is_refused(ranks: Pools, sequence: bool) -> None:
    assert ranks(2).run(refusals, 2, sequence) == [1, 1]


def test_random_streams_are_those_of_the_device_that_a_model_is_moved_to() -> None:
    model, fresh = (
        ZeroTPForCausalLM(reference_model().config, Topology(world=1), seed=3) for _ in range(2)
    )
    with model.streams.use(SHARED):
        torch.rand(1)
    drawn = model.streams.state_dict()
    model.double()
    assert all(map(torch.equal, model.streams.state_dict().values(), drawn.values())), (
        "a cast restarts nothing"
    )
    # As if it came from there.
    with patch.object(RandomStreams, "generator_device", torch.device("cuda", 0)):
        model.activation_checkpointing_enable()
        recomputing = model._activations
        model.float()
    assert all(
        map(torch.equal, model.streams.state_dict().values(), fresh.streams.state_dict().values())
    )
    assert model._activations is recomputing
    model.to(device=torch.device("meta"))  # type: ignore[call-arg]
    assert model._activations is not recomputing and model.streams.generator_device == torch.device(
        "cpu"
    )


def test_a_description_of_a_grid_cannot_run() -> None:
    model = ZeroTPForCausalLM(reference_model().config, Topology(2, world=2, rank=1))
    with pytest.raises(RuntimeError, match="only describes a grid"):
        model(torch.zeros(1, 4, dtype=torch.long))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 3}, "heads 3 ≠ tensor 2 × 1.5 a rank; use a tensor degree that divides 3"),
        ({"n_inner": 7}, "MLP width 7 ≠ tensor 2 × 3.5 a rank; use a tensor degree that divides 7"),
        ({"n_head": 5}, r"^GPT2Config\.n_embd: hidden size 24 ≠ heads 5"),
        ({"n_positions": 0}, r"^GPT2Config\.n_positions: 0 is not positive; give 1 or more"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ZeroTPForCausalLM(GPT2Config(**{**SIZES, **changes}), Topology(2, world=2))
