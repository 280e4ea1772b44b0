"""The attention cores against attention in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, LlamaConfig

from tests.support.packed import packed_kernels
from zero_tp.model.architectures import architecture_of
from zero_tp.model.attention import CORES, SDPACore
from zero_tp.model.context import AttentionMask, PackedSequences, VarlenMask
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel.elementwise import CHUNKED
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology

BATCH, HEADS, LENGTH, SIZE = 3, 2, 48, 24


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("padding", ["", "left", "right"])
@pytest.mark.parametrize("name", list(CORES))
def test_output_and_gradients(
    name: str, padding: str, dtype: torch.dtype, allowed: float, seed: int
) -> None:
    config = GPT2Config(n_embd=HEADS * SIZE, n_head=HEADS, attn_pdrop=0.0)
    cap = 2.0 if name in ("soft_cap", "flex_attention") else None
    spec = architecture_of(config).spec(config)
    spec = replace(spec, attention=name, score_cap=cap)  # type: ignore[arg-type]
    core = CORES[name](spec, RandomStreams(Topology(world=1), 0))
    torch.manual_seed(seed)
    # Of the size of a row's log-sum-exp, so that they take a part of each softmax.
    sinks = [torch.randn(HEADS).add(2).to(dtype)] if name in ("sinks", "flex_sinks") else []
    sinks = [each.requires_grad_() for each in sinks]
    tokens = None
    if padding:
        tokens = torch.ones(BATCH, LENGTH)
        tokens[1, : LENGTH // 3] = 0
        tokens[2, :-1] = 0
        tokens = tokens if padding == "left" else tokens.flip(1)
    # Views of [s, b, 3, a, d], as the fused product gives them. Of numbers of size 1: larger scores
    # have errors in bf16 near what is allowed, in one seed of three hundred over it.
    fused = torch.randn(LENGTH, BATCH, 3, HEADS, SIZE).to(dtype)
    upstream = torch.randn(BATCH, HEADS, LENGTH, SIZE).to(dtype)
    given, exact = fused.clone().requires_grad_(), fused.double().requires_grad_()

    mask = core.build_mask(AttentionMask(LENGTH, LENGTH, padding_mask=tokens), spec, fused)
    output = core(*given.permute(2, 1, 3, 0, 4), *sinks, mask=mask)
    output.backward(upstream)

    query, key, value = exact.permute(2, 1, 3, 0, 4)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if tokens is not None:
        visible = visible & tokens.bool()[:, None, None, :]
    # A query that sees no key: eager's scores are all one number, sdpa's output is 0
    # (test_hidden_queries.py).
    hidden = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(
        ~visible, torch.finfo(dtype).min
    )
    scores = query @ key.transpose(-2, -1) / SIZE**0.5
    scores = (cap * torch.tanh(scores / cap) if cap else scores) + hidden
    # One for each query: their gradients are what a sink's sums.
    columns = [
        each.detach().double().view(-1, 1, 1).expand(*scores.shape[:-1], 1).clone().requires_grad_()
        for each in sinks
    ]
    weights = torch.cat((scores, *columns), -1).softmax(-1)[..., :LENGTH]
    expected = (
        weights if spec.stores_scores(flash=False) else weights * visible.any(-1, keepdim=True)
    ) @ value
    expected.backward(upstream.double())
    assert output.dtype == dtype
    assert distance(output.detach(), expected.detach()) < allowed
    assert given.grad is not None and exact.grad is not None
    assert distance(given.grad, exact.grad) < allowed
    for found, terms in zip(sinks, columns, strict=True):
        assert found.grad is not None and terms.grad is not None
        # Terms of both signs cancel, and each is rounded; so is their sum, which can be larger.
        total = terms.grad.sum((0, 2, 3))
        error = found.grad.double() - total
        rounding = torch.finfo(dtype).eps * total.norm()
        assert error.norm() < allowed * terms.grad.norm() + rounding


@settings(max_examples=25)
@given(
    numbers=st.lists(st.lists(st.integers(0, 2), min_size=11, max_size=11), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 12),
    kv_heads=st.sampled_from([1, 2, 4]),
)
def test_pieces_are_what_the_mask_shows(
    numbers: list[list[int]], window: int | None, kv_heads: int
) -> None:
    """Documents and windows without a mask, in fp64, against SDPA beside a mask; output and
    gradients.
    """
    documents = torch.tensor(numbers)
    batch, length = documents.shape
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads)
    spec = architecture_of(config).spec(config)
    core = SDPACore(spec, RandomStreams(Topology(world=1), 0))
    heads = [
        torch.randn(length, batch, each, 8, dtype=torch.float64) for each in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(batch, 4, length, 8, dtype=torch.float64)
    facts = AttentionMask(
        length,
        length,
        packed=PackedSequences.from_document_ids(documents, torch.device("cpu")),
        window=window,
    )
    # Neighbours of one number are one piece, others are not.
    apart = (documents[:, 1:] != documents[:, :-1]).long().cumsum(1)
    same = torch.nn.functional.pad(apart, (1, 0))
    visible = (same[:, :, None] == same[:, None, :]) & torch.ones(
        length, length, dtype=torch.bool
    ).tril()
    visible &= torch.ones(length, length, dtype=torch.bool).triu(-(window or length) + 1)
    assert torch.equal(facts.visible(torch.device("cpu")), visible[:, None])

    def computed(kind: type) -> list[Tensor]:
        given = [each.clone().requires_grad_() for each in heads]
        mask = core.build_mask(facts, spec, heads[0])
        assert isinstance(mask, kind)
        output = core(*(each.permute(1, 2, 0, 3) for each in given), mask)
        output.backward(upstream)
        return [output.detach(), *(each.grad for each in given)]

    expected = computed(Tensor)
    with packed_kernels() as kernel:
        found = computed(VarlenMask)
        kernel.assert_called_once()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_window_alone_is_a_piece_for_each_row() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    spec = architecture_of(config).spec(config)
    like = torch.empty(6, 2, 32)
    with packed_kernels():
        mask = SDPACore.build_mask(AttentionMask(6, 6, window=3), spec, like)
    assert isinstance(mask, VarlenMask) and mask.window == 2
    assert mask.packed.cu_seqlens.tolist() == [0, 6, 12] and mask.packed.max_seqlen == 6


class Copies(TorchDispatchMode):
    """Counts the operations that copy tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function._opname in ("cat", "stack", "clone", "copy_", "_to_copy"):
            self.found.append(function._opname)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_gradients_of_the_heads_are_copied_once_at_most(kv_heads: int) -> None:
    """With positions outermost in memory, as the cores return them."""
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=kv_heads, num_hidden_layers=1
    )
    model: Any = ZeroTPForCausalLM(config, Topology(world=1), seed=0)
    heads = model.transformer.layers[0].attention.qkv(
        torch.randn(6, 2, 32, requires_grad=True), sequence=False, rotation=None, ops=CHUNKED
    )
    gradients = [torch.randn(6, 2, each.shape[1], 8).permute(1, 2, 0, 3) for each in heads]
    with Copies() as copies:
        torch.autograd.backward(heads, gradients)
    assert copies.found == ["cat"] * (kv_heads == 4)
