"""The attention cores against attention in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config

from zero_tp.models.architectures import architecture_of
from zero_tp.models.attention import CORES
from zero_tp.models.context import AttentionMask
from zero_tp.parallel.random import RandomStreams
from zero_tp.topology import Topology

BATCH, HEADS, LENGTH, SIZE = 3, 2, 48, 24


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("name", list(CORES))
def test_output_and_gradients(name: str, padding: str, dtype: torch.dtype, allowed: float, seed: int) -> None:
    config = GPT2Config(n_embd=HEADS * SIZE, n_head=HEADS, attn_pdrop=0.0)
    spec = replace(architecture_of(config).spec(config), attention=name)  # type: ignore[arg-type]
    core = CORES[name](spec, RandomStreams(Topology(world=1), 0))
    torch.manual_seed(seed)
    tokens = None
    if padding:
        tokens = torch.ones(BATCH, LENGTH)
        tokens[1, : LENGTH // 3] = 0
        tokens[2, :-1] = 0
        tokens = tokens if padding == "left" else tokens.flip(1)
    # Views of [s, b, 3, a, d], as the fused product gives them.
    fused = (torch.randn(LENGTH, BATCH, 3, HEADS, SIZE) * 2).to(dtype)
    upstream = torch.randn(BATCH, HEADS, LENGTH, SIZE).to(dtype)
    given, exact = fused.clone().requires_grad_(), fused.double().requires_grad_()

    mask = core.mask(AttentionMask(LENGTH, LENGTH, padding=tokens), fused)
    output = core(*given.permute(2, 1, 3, 0, 4), mask)
    output.backward(upstream)

    query, key, value = exact.permute(2, 1, 3, 0, 4)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if tokens is not None:
        seen = seen & tokens.bool()[:, None, None, :]
        seen = seen | (torch.eye(LENGTH, dtype=torch.bool) & ~seen.any(-1, keepdim=True))
    scores = (query @ key.transpose(-2, -1) / SIZE**0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ value
    expected.backward(upstream.double())
    assert output.dtype == dtype
    assert distance(output.detach(), expected.detach()) < allowed
    assert given.grad is not None and exact.grad is not None
    assert distance(given.grad, exact.grad) < allowed
