"""Peak memory of the loss, counted on fake tensors, and its sums of 16-bit blocks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.allocations import largest_allocation
from tests.support.compare import leaf
from tests.support.loss_memory import blocks
from tests.tiers import THOROUGH, in_tiers
from zero_tp.parallel import elementwise
from zero_tp.parallel import loss as module
from zero_tp.parallel.loss import vocab_parallel_cross_entropy
from zero_tp.tools.planning.tracking import Allocations

BLOCK = 2**23
"""Logits of a block, at most, before blocks became as large as the weight's gradient, and in
evaluation.
"""


def peak(dtype: torch.dtype, tokens: int, size: int, rows: int, *, trained: bool = True) -> int:
    """Return the peak bytes of forward and backward on one rank, without their inputs."""
    with FakeTensorMode(), Allocations() as allocations:
        shapes = ((tokens, 1, size), (rows, size))
        hidden, weight = (
            torch.empty(*shape, dtype=dtype, requires_grad=trained) for shape in shapes
        )
        labels = torch.zeros(tokens, 1, dtype=torch.long)
        allocations.mark((hidden, weight, labels), "given")
        found, *_ = vocab_parallel_cross_entropy(
            hidden, weight, labels, vocabulary=rows, group=None
        )
        if trained:
            found.backward()
    now = most = 0
    for _, one, sign in allocations.timeline():
        now += sign * one.bytes if one.category is None else 0
        most = max(most, now)
    return most


def before(dtype: torch.dtype, tokens: int, size: int, rows: int) -> int:
    """Return the peak of an earlier loss: chunks of 2^23 logits in fp32 and in the dtype, and an
    fp32 gradient that accumulates them, with a few numbers a token.
    """
    element = dtype.itemsize
    chunk = min(tokens, BLOCK // rows) * rows
    weight, hidden = rows * size, element * tokens * size
    narrow = 0 if dtype == torch.float32 else element
    forward = 4 * weight + narrow * weight + hidden + (4 + narrow) * chunk
    return max(forward, (4 + element) * weight + 2 * hidden) + 48 * tokens


PEAKS = [
    (torch.bfloat16, 2048),  # the largest block alone
    *((torch.bfloat16, tokens) for tokens in (300, 2049, 5000)),
    *((torch.float16, 5000), (torch.float32, 1024), (torch.float32, 4096)),
]


@THOROUGH
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tokens"), in_tiers(PEAKS, PEAKS[:1]))
def test_the_peak_is_not_above_that_of_small_chunks(dtype: torch.dtype, tokens: int) -> None:
    size, rows = 1024, 16384
    allowed = before(dtype, tokens, size, rows)
    # The weight's gradient is counted, at least.
    assert dtype.itemsize * rows * size < peak(dtype, tokens, size, rows) <= allowed


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=THOROUGH)])
def test_the_backward_copies_no_whole_gradient(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of a bf16 tensor with an fp32 number makes fp32 copies, on a CPU."""
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", 2**10)
    hidden, weight = (
        leaf(torch.randn(64, 1, 256, dtype=dtype)),
        leaf(torch.randn(2**12, 256).to(dtype)),
    )
    labels = torch.zeros(64, 1, dtype=torch.long)
    found, *_ = vocab_parallel_cross_entropy(hidden, weight, labels, vocabulary=2**12, group=None)
    assert largest_allocation((found / 3).backward) < weight.numel() * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=THOROUGH)])
def test_without_gradients_a_block_is_small(dtype: torch.dtype) -> None:
    assert peak(dtype, 2048, 1024, 16384, trained=False) <= 6 * BLOCK


def test_a_frozen_weight_needs_no_large_block() -> None:
    assert module.block_positions(2048, 1, 16384, 0, torch.bfloat16) == BLOCK // 16384


def test_fp16_holds_the_sum_of_many_tokens_with_one_label() -> None:
    """It is 114,688 before it is divided by the number of tokens, and fp16 ends at 65,504."""
    hidden, weight = torch.full((2048, 1, 4), 64.0), torch.zeros(8, 4)
    labels = torch.zeros(2048, 1, dtype=torch.long)
    reference, given = leaf(weight), leaf(weight.half())
    F.cross_entropy(F.linear(hidden, reference).flatten(0, 1), labels.flatten()).backward()
    vocab_parallel_cross_entropy(hidden.half(), given, labels, vocabulary=8, group=None)[
        0
    ].backward()
    assert given.grad is not None and reference.grad is not None
    torch.testing.assert_close(given.grad.float(), reference.grad, rtol=2**-10, atol=0.0)


@THOROUGH
def test_the_bound_of_bf16_blocks() -> None:
    """Each block's product is rounded once, by up to 2^-8; each fp32 addition rounds by up to
    2^-24.
    """
    share = 0.0
    for count in (1, 2, 5, 16):
        for rows in (1, 8, BLOCK):  # of a product at once
            pairs, exact, sizes = blocks(torch.bfloat16, count)
            total = torch.zeros(24, 16)
            with mock.patch.object(module, "BLOCK_ELEMENTS", 16 * rows):
                for first, second in pairs:
                    module._add_product_(total, first, second)
            error = (total - torch.stack(exact).sum(0)).abs()
            bound = 2**-8 * torch.stack(exact).abs().sum(0) + 2 * (96 + count) * 2**-24 * sizes
            assert (error <= bound).all()
            share = max(share, float((error / bound).max()))
    assert share > 0.5, "the bound is near what happens"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gemms_that_accumulate_in_fp32_round_no_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA one `addmm` a block accumulates in fp32; a CPU function stands in for its kernel."""
    calls = []

    def added(
        total: Tensor,
        first: Tensor,
        second: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: Any = 1,
        alpha: Any = 1,
        out: Tensor,
    ) -> Tensor:
        assert (first.dtype, second.dtype, out_dtype, beta, alpha) == (
            dtype,
            dtype,
            torch.float32,
            1,
            1,
        )
        assert out.data_ptr() == total.data_ptr() and out.dtype == torch.float32
        calls.append(out)
        return out.copy_(total + first.float() @ second.float())

    pairs, exact, sizes = blocks(dtype, 3)
    total = torch.zeros(24, 16)
    monkeypatch.setattr(module, "_FP32_SUMS", ("cpu",))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", added, "CPU")
        for first, second in pairs:
            module._add_product_(total, first, second)
    assert len(calls) == 3
    assert ((total - torch.stack(exact).sum(0)).abs() <= 2 * 99 * 2**-24 * sizes).all()
