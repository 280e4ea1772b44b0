"""Random streams on a CUDA device: `pytest -m cuda tests/cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import GPT2Config

from tests.support.random_draws import draw_as_a_run
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology

pytestmark = pytest.mark.cuda


@contextmanager
def copied_state(generator: torch.Generator) -> Iterator[None]:
    outside = torch.cuda.get_rng_state()
    torch.cuda.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.cuda.get_rng_state())
        torch.cuda.set_rng_state(outside)


def test_shared_states_give_what_copied_ones_do() -> None:
    copying, sharing = RandomStreams(Topology(), 5, "cuda"), RandomStreams(Topology(), 5, "cuda")
    copying._activate = copied_state
    results = []
    for streams in (copying, sharing):
        torch.cuda.manual_seed(1)
        results.append(draw_as_a_run(streams, lambda: torch.rand(3, device="cuda")))
    expected, found = results
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("moved", [False, True])
def test_a_model_on_the_device_recomputes_its_dropout(moved: bool) -> None:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=16, vocab_size=64)
    tokens, found = torch.arange(32, device="cuda").view(2, 16), []
    for recomputes in (False, True):
        model = ZeroTPForCausalLM(
            config, Topology(world=1), seed=5, device="cpu" if moved else "cuda"
        ).train()
        model.to(device=torch.device("cuda"))
        if recomputes:
            model.activation_checkpointing_enable()
        torch.cuda.manual_seed(7 + recomputes)
        model(tokens, labels=tokens).loss.backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
