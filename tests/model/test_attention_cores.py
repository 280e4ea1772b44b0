"""The attention cores against attention in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, LlamaConfig

from tests.support.packed import packed_kernels
from tests.tiers import examples
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model import cpu_flash
from zero_tp.model.architectures import architecture_of
from zero_tp.model.attention import CORES, SDPACore
from zero_tp.model.context import AttentionMask, PackedSequences, VarlenMask
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory
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
    spec = replace(architecture_of(config).spec(config), attention=name)  # type: ignore[arg-type]
    core = CORES[name](spec, RandomStreams(Topology(world=1), 0))
    torch.manual_seed(seed)
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
    output = core(*given.permute(2, 1, 3, 0, 4), mask)
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
    weights = (query @ key.transpose(-2, -1) / SIZE**0.5 + hidden).softmax(-1)
    expected = (weights if name == "eager" else weights * visible.any(-1, keepdim=True)) @ value
    expected.backward(upstream.double())
    assert output.dtype == dtype
    assert distance(output.detach(), expected.detach()) < allowed
    assert given.grad is not None and exact.grad is not None
    assert distance(given.grad, exact.grad) < allowed


@examples(4, 25)
@given(
    length=st.integers(2 * cpu_flash.BLOCK, 6 * cpu_flash.BLOCK),
    kv_heads=st.sampled_from([1, 2, 4]),
    size=st.sampled_from([24, 64, 80]),
    causal=st.booleans(),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    together=st.integers(1, 4),
)
def test_attention_by_products_is_that_of_torch(
    length: int,
    kv_heads: int,
    size: int,
    causal: bool,
    spread: float,
    dtype: torch.dtype,
    together: int,
) -> None:
    """Against fp64: about as near to it as torch's own kernel, neither too long nor too short."""
    config = LlamaConfig(
        hidden_size=4 * size, head_dim=size, num_attention_heads=4, num_key_value_heads=kv_heads
    )
    spec = replace(architecture_of(config).spec(config), causal=causal)
    core = SDPACore(spec, RandomStreams(Topology(world=1), 0))
    drawn = [torch.randn(length, 2, heads, size).bfloat16() for heads in (4, kv_heads, kv_heads)]
    drawn[0] *= spread
    upstream = torch.randn(2, 4, length, size).bfloat16()

    def computed(dtype: torch.dtype, here: bool) -> tuple[Tensor, list[Tensor]]:
        given = [each.to(dtype, copy=True).requires_grad_() for each in drawn]
        with (
            patch.object(cpu_flash, "is_faster", lambda *_: here),
            patch.object(cpu_flash, "BLOCK_ELEMENTS", together * cpu_flash.BLOCK * length),
        ):
            output = core(*(each.permute(1, 2, 0, 3) for each in given), None)
            output.backward(upstream.to(dtype))
        assert output.grad_fn is not None and ("_Flash" in output.grad_fn.name()) == here
        return output.detach(), [each.grad for each in given if each.grad is not None]

    exact, theirs, ours = (
        [output, *gradients]
        for output, gradients in (
            computed(torch.float64, here=False),
            computed(dtype, here=False),
            computed(dtype, here=True),
        )
    )
    for one, other, right in zip(ours, theirs, exact, strict=True):
        assert distance(one, right) < 2 * distance(other, right)
        assert (
            abs(float((one.double() - right).flatten() @ right.flatten()))
            < 2**-10 * float(right.norm()) ** 2
        )


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


def test_attention_by_products_keeps_what_torch_keeps() -> None:
    query, key, value = (
        torch.randn(2 * cpu_flash.BLOCK, 2, heads, 16).permute(1, 2, 0, 3).requires_grad_()
        for heads in (4, 2, 2)
    )

    def kept(attention: Callable[[], Tensor]) -> list[int]:
        found: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            attention()
        return sorted(found.values())

    theirs = kept(
        lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    )
    assert kept(lambda: cpu_flash.flash_attention(query, key, value, True)) == theirs


def test_a_model_learns_the_same_from_attention_by_products(seed: int) -> None:
    """Every gradient of a bf16 Llama: bit for bit under each recomputation, as near to fp32's as
    with torch's own.
    """
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=2 * cpu_flash.BLOCK + 16,
    )
    tokens = torch.randint(64, (2, 2 * cpu_flash.BLOCK + 16))
    weights = ZeroTPForCausalLM(
        config, Topology(world=1), seed=seed, dtype=torch.bfloat16
    ).state_dict()

    def gradients(
        mode: str, *, here: bool, dtype: torch.dtype = torch.bfloat16
    ) -> dict[str, Tensor]:
        model = ZeroTPForCausalLM(config, Topology(world=1), dtype=dtype).train()
        model.load_state_dict(weights)
        ActivationMemory(
            model,
            RecomputePolicy.model_validate({"mode": mode}),
            ActivationCheckpointing(),
            torch.device("cpu"),
        )
        with (
            patch.object(cpu_flash, "is_faster", lambda *_: here),
            patch.object(cpu_flash, "_gradients", wraps=cpu_flash._gradients) as used,
        ):
            model(input_ids=tokens, labels=tokens).loss.backward()
        assert used.called == here
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    exact = gradients("none", here=False, dtype=torch.float32)
    theirs, ours = gradients("none", here=False), gradients("none", here=True)
    assert ours.keys() == theirs.keys() == exact.keys()
    for name, one in ours.items():
        assert (
            distance(one, exact[name].double())
            < 1.5 * distance(theirs[name], exact[name].double()) + 2**-9
        ), name
    for mode in ("selective", "full"):
        for name, one in gradients(mode, here=True).items():
            assert torch.equal(one, ours[name]), (mode, name)


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
        torch.randn(6, 2, 32, requires_grad=True), sequence=False
    )
    gradients = [torch.randn(6, 2, each.shape[1], 8).permute(1, 2, 0, 3) for each in heads]
    with Copies() as copies:
        torch.autograd.backward(heads, gradients)
    assert copies.found == ["cat"] * (kv_heads == 4)
