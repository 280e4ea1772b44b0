"""Attention's kernels on a CUDA device: `pytest -m cuda tests/cuda`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from transformers import Gemma2Config, GptOssConfig, LlamaConfig, MistralConfig

from zero_tp.data.batch import Batch, separate_documents
from zero_tp.engine.guards import deterministic_algorithms
from zero_tp.model import flex_attention
from zero_tp.model.architectures import architecture_of
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.attention import (
    CORES,
    AttentionCore,
    SDPACore,
    SinkCore,
    SoftCapCore,
    can_use_varlen,
    disable_cudnn_for_mask,
)
from zero_tp.model.attention_kernel import describe_attention
from zero_tp.model.context import AttentionMask, PackedSequences, VarlenMask
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.parallel import devices
from zero_tp.parallel.random import RandomStreams
from zero_tp.parallel.topology import Topology

pytestmark = pytest.mark.cuda
DEVICE = torch.device("cuda", 0)
LENGTH = 384


@pytest.fixture(autouse=True)
def _kernels_of_pieces() -> None:
    assert devices.runs_flash(DEVICE), "these tests need compute capability 8.0"
    torch._dynamo.reset()  # it compiles a function for eight cases at most
    flex_attention._first_shape.clear()


def documents_of(rows: int) -> Tensor:
    """Numbers of documents of 1 to 300 tokens, [rows, LENGTH]; of three rows the last is one
    document.
    """
    lengths = torch.tensor([1, 300, 7, 64, 1, 11, 128, 129])
    numbers = torch.arange(2 * len(lengths)).repeat_interleave(lengths.repeat(2))
    return torch.stack(
        [
            torch.zeros_like(numbers[:LENGTH]) if row == 2 else numbers[13 * row :][:LENGTH]
            for row in range(rows)
        ]
    )


def spec_of(size: int, kv_heads: int) -> TransformerSpec:
    config = LlamaConfig(hidden_size=8 * size, num_attention_heads=8, num_key_value_heads=kv_heads)
    return architecture_of(config).spec(config)


def computed(
    spec: TransformerSpec,
    facts: AttentionMask,
    heads: list[Tensor],
    upstream: Tensor,
    *,
    masked: bool,
) -> list[Tensor]:
    """The core's output, and the gradients of Q, K and V, in the heads' dtype."""
    given = [each.clone().requires_grad_() for each in heads]
    like = given[0].flatten(2)
    mask = (AttentionCore if masked else SDPACore).build_mask(facts, spec, like)
    assert isinstance(mask, Tensor if masked else VarlenMask)
    output = SDPACore(spec, RandomStreams(Topology(world=1), 0, DEVICE))(
        *(each.permute(1, 2, 0, 3) for each in given), mask
    )
    output.backward(upstream)
    return [output.detach(), *(each.grad for each in given if each.grad is not None)]


@pytest.mark.parametrize(
    ("apart", "window"),
    [(True, None), (True, 1), (True, 100), (False, 1), (False, 100)],  # neither is causal alone
)
@pytest.mark.parametrize(
    ("rows", "size", "kv_heads"), [(1, 64, 8), (3, 128, 2), (3, 80, 1), (2, 192, 4)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pieces_without_a_mask(
    rows: int, size: int, kv_heads: int, apart: bool, window: int | None, dtype: torch.dtype
) -> None:
    """Output and every gradient are as near to fp64's as SDPA beside a mask comes, twice as far
    at most.
    """
    spec = spec_of(size, kv_heads)
    generator = torch.Generator(DEVICE).manual_seed(1)
    heads = [
        torch.randn(LENGTH, rows, each, size, device=DEVICE, generator=generator).to(dtype)
        for each in (8, kv_heads, kv_heads)
    ]
    upstream = torch.randn(rows, 8, LENGTH, size, device=DEVICE, generator=generator).to(dtype)
    packed = PackedSequences.from_document_ids(documents_of(rows), DEVICE) if apart else None
    facts = AttentionMask(LENGTH, LENGTH, packed=packed, window=window)
    exact = computed(spec, facts, [each.double() for each in heads], upstream.double(), masked=True)
    beside = computed(spec, facts, heads, upstream, masked=True)
    without = computed(spec, facts, heads, upstream, masked=False)
    assert len(without) == 4
    for one, other, right in zip(without, beside, exact, strict=True):
        # With a window of 1 the gradients of Q and K are zero, and what is found of them is
        # rounding.
        least = 1e-4 * float(right.norm() + upstream.double().norm())
        assert float((one - right).norm()) <= 2 * float((other - right).norm()) + least


@pytest.fixture
def batch() -> Iterator[Batch]:
    numbers = torch.cat((documents_of(3), documents_of(3)[:, -1:]), 1)
    windows = torch.randint(0, 1000, (3, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    yield separate_documents(windows, numbers).to(DEVICE)


def model_of(window: int | None) -> ZeroTPForCausalLM:
    config = MistralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        vocab_size=1000,
        sliding_window=window,
    )
    return ZeroTPForCausalLM(config, seed=1, dtype=torch.bfloat16, device=DEVICE).train()


def gradients(batch: Batch, window: int | None) -> list[Tensor]:
    model = model_of(window)
    loss = model(
        batch.input_ids,
        shift_labels=batch.labels,
        position_ids=batch.position_ids,
        document_ids=batch.document_ids,
    ).loss
    loss.backward()
    return [loss.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


@pytest.mark.parametrize("window", [None, 100])
def test_a_model_of_documents_and_windows(batch: Batch, window: int | None) -> None:
    found = gradients(batch, window)
    with mock.patch.object(devices, "runs_flash", lambda _: False):
        masked = gradients(batch, window)
    for one, other in zip(found, masked, strict=True):
        torch.testing.assert_close(one.norm(), other.norm(), rtol=1e-2, atol=1e-5)
        assert float((one - other).float().norm()) <= 3e-2 * float(other.float().norm()) + 1e-6


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 100])
def test_a_repeated_run_gives_the_same_bits(batch: Batch, window: int | None, masked: bool) -> None:
    """By the flash kernel for pieces, or by the memory-efficient one beside a mask."""
    with (
        deterministic_algorithms(),
        mock.patch.object(devices, "runs_flash", lambda _: not masked),
    ):
        pairs = zip(gradients(batch, window), gradients(batch, window), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_the_host_waits_for_nothing_of_it(batch: Batch) -> None:
    model = model_of(100)

    def backward() -> Tensor:
        loss = model(
            batch.input_ids,
            shift_labels=batch.labels,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
        ).loss
        loss.backward()
        return loss

    backward()  # makes what is made once, such as the frequencies of rotary positions
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = backward()  # any wait is an error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.isfinite()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in model.parameters()
    )


def test_no_mask_is_made(batch: Batch) -> None:
    """The peak of a forward and backward grows by less than the mask of 2·b·s² that it would
    otherwise make.
    """

    def peak() -> int:
        model = model_of(None)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(
            batch.input_ids, shift_labels=batch.labels, document_ids=batch.document_ids
        ).loss.backward()
        return torch.cuda.max_memory_allocated() - before

    peak()
    without = peak()
    with mock.patch.object(devices, "runs_flash", lambda _: False):
        assert peak() > without


def test_no_mask_reaches_cudnn() -> None:
    query = torch.empty(2, 8, 1024, 128, dtype=torch.bfloat16, device=DEVICE)
    mask = query.new_zeros(1024, 1024)
    with disable_cudnn_for_mask(mask):
        masked = torch._fused_sdp_choice(query, query, query, mask, 0.0, False)
    assert SDPBackend(masked) == SDPBackend.EFFICIENT_ATTENTION
    mask_of_documents = AttentionMask(
        1024, 1024, packed=PackedSequences.one_per_row(2, 1024, DEVICE)
    )
    assert can_use_varlen(mask_of_documents, spec_of(128, 2), torch.bfloat16, DEVICE)


@pytest.mark.parametrize(("apart", "window"), [(False, None), (False, 100), (True, 100)])
@pytest.mark.parametrize(("size", "kv_heads"), [(256, 4), (64, 8), (80, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Gemma2Config, GptOssConfig])
def test_capped_scores_and_sinks_by_flex_attention(
    kind: Any,
    size: int,
    kv_heads: int,
    apart: bool,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """As near to fp64's as eager scores come, twice as far at most."""
    capped = {"attn_logit_softcapping": 2.0} if kind is Gemma2Config else {}
    config = kind(
        hidden_size=8 * size,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=size,
        **capped,
    )
    config._attn_implementation = "flex_attention"
    spec = architecture_of(config).spec(config)
    generator = torch.Generator(DEVICE).manual_seed(1)
    heads = [
        torch.randn(3, each, LENGTH, size, device=DEVICE, generator=generator).to(dtype)
        for each in (8, kv_heads, kv_heads)
    ]
    if not capped:
        heads.append(torch.randn(8, device=DEVICE, generator=generator).to(dtype))
    upstream = torch.randn(3, 8, LENGTH, size, device=DEVICE, generator=generator).to(dtype)
    packed = PackedSequences.from_document_ids(documents_of(3), DEVICE) if apart else None
    facts = AttentionMask(LENGTH, LENGTH, packed=packed, window=window)

    eager_core = SoftCapCore if capped else SinkCore

    def computed(kind: type[AttentionCore], dtype: torch.dtype) -> list[Tensor]:
        core = kind(spec, RandomStreams(Topology(world=1), 0, DEVICE))
        own = [each.detach().to(dtype).clone().requires_grad_() for each in heads]
        mask = core.build_mask(facts, spec, own[0].new_empty(LENGTH, 3, 8))
        assert isinstance(mask, Tensor) == (kind is eager_core)
        output = core(*own, mask=mask)
        output.backward(upstream.to(dtype))
        return [output.detach(), *(each.grad for each in own if each.grad is not None)]

    exact = computed(eager_core, torch.float64)
    eager, found = computed(eager_core, dtype), computed(CORES[spec.attention], dtype)
    assert len(found) == 1 + len(heads)
    for one, other, right in zip(found, eager, exact, strict=True):
        least = 1e-5 * float(right.norm())
        assert float((one - right).norm()) <= 2 * float((other - right).norm()) + least


def test_the_kernel_of_a_run_is_a_fused_one() -> None:
    lines = list(
        describe_attention(spec_of(128, 8), DEVICE, torch.bfloat16, 1024, 1, documents=False)
    )
    assert lines[0].startswith("attention: sdpa (") and "maths" not in lines[0]
