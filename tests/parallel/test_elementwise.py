"""Elementwise functions on chunks of rows compute what they compute on whole tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from tests.support.compare import grid
from tests.support.store_runs import LAYERS, LENGTH, run_simulated
from tests.support.streams import BATCH, VOCABULARY, config_of
from tests.tiers import THOROUGH
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.mlp import ClampedGatedActivation, GatedActivation
from zero_tp.model.rms_norm import OffsetScaling, Scaling, WideScaling, _RMSNorm
from zero_tp.parallel import elementwise, loss
from zero_tp.parallel.elementwise import CHUNKED
from zero_tp.parallel.gradients import sum_of_squares

CHUNK_ELEMENTS = [1, 64, 10**6]


@pytest.fixture(params=CHUNK_ELEMENTS)
def elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(elementwise, "CACHE_ELEMENTS", request.param)
    return int(request.param)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def test_chunks_cover_each_row_once(elements: int) -> None:
    matrix = torch.arange(7 * 24).view(7, 24)
    found = [matrix[chunk] for chunk in CHUNKED.chunks(matrix)]
    assert torch.equal(torch.cat(found), matrix)
    sizes = [len(each) for each in found]
    wanted = elements * torch.get_num_threads() / 24  # rows
    assert max(sizes) <= max(1, 1.5 * wanted) and max(sizes) >= min(7, wanted * 2 / 3)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "function", [F.silu, lambda gate: F.gelu(gate, approximate="tanh")], ids=["silu", "gelu"]
)
def test_a_gated_activation_equals_autograd(
    elements: int, function: object, dtype: torch.dtype, strided: bool
) -> None:
    wide, gradient = drawn(5, 3, 24, dtype=dtype), torch.randn(5, 3, 12).to(dtype)
    if strided:
        wide = wide.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = function(gate) * up  # type: ignore[operator]
    (of_wide,) = torch.autograd.grad(expected, wide, gradient)
    found = GatedActivation(function)(wide)  # type: ignore[arg-type]
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found, wide, gradient)[0], of_wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clamped_activation_equals_autograd(elements: int, dtype: torch.dtype) -> None:
    """Most of gate and up are beyond the limit; transformers' own formula."""
    wide, gradient = drawn(5, 3, 24, dtype=dtype), torch.randn(5, 3, 12).to(dtype)
    layer: Any = SimpleNamespace(alpha=1.702, limit=0.4)
    theirs = wide.unflatten(-1, (2, 12)).transpose(-2, -1).flatten(-2)  # it interleaves
    expected = GptOssExperts._apply_gate(layer, theirs)
    (of_wide,) = torch.autograd.grad(expected, wide, gradient)
    found = ClampedGatedActivation(1.702, 0.4)(wide)
    pairs = ((found, expected), (torch.autograd.grad(found, wide, gradient)[0], of_wide))
    # torch's sigmoid has other last bits for the elements that fill no vector register.
    error = 1e-6 if dtype == torch.float32 else 0.0
    for ours, other in pairs:
        torch.testing.assert_close(ours, other, rtol=error, atol=error)


@pytest.mark.parametrize("kind", ["norm", "residual", "branch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_equals_torch(elements: int, dtype: torch.dtype, kind: str) -> None:
    """Alone, with its input as a residual, and of the sum with a branch."""
    tensor, weight = drawn(5, 3, 24, dtype=dtype), drawn(24, dtype=dtype)
    branch = drawn(5, 3, 24, dtype=dtype) if kind == "branch" else None
    gradient, of_residual = torch.randn(2, 5, 3, 24).to(dtype)
    exact = [each.detach().double().requires_grad_() for each in (tensor, weight)]
    exact_branch = None if branch is None else branch.detach().double().requires_grad_()
    limit = 1e-6 if dtype == torch.float32 else 8e-3
    for scaling in (Scaling, WideScaling, OffsetScaling, None):
        # Without a scaling there is no weight.
        factor = exact[1] + 1 if scaling is OffsetScaling else exact[1] if scaling else None
        leaves = slice(2 if scaling else 1)
        total = exact[0] if exact_branch is None else exact[0] + exact_branch
        expected = [total, F.rms_norm(total, (24,), factor, 1e-5)]
        settings = (1e-5, scaling or Scaling, None, CHUNKED, kind != "norm")
        found = _RMSNorm.apply(tensor, weight if scaling else None, branch, *settings)
        upstream = [of_residual, gradient]
        if kind == "norm":
            found, expected, upstream = [found], expected[1:], upstream[1:]
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= limit * other.abs().max()
        own = [*(tensor, weight)[leaves], *([] if branch is None else [branch])]
        right = [*exact[leaves], *([] if exact_branch is None else [exact_branch])]
        ours = torch.autograd.grad(found, own, upstream)
        theirs = torch.autograd.grad(expected, right, [each.double() for each in upstream])
        for mine, yours in zip(ours, theirs, strict=True):
            assert (mine - yours).abs().max() <= 2 * limit * yours.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_is_in_fp64(elements: int, dtype: torch.dtype) -> None:
    tensor = (torch.randn(9, 31) * 1e3).to(dtype).t()
    expected = tensor.double().square().sum()
    assert sum_of_squares(tensor).item() == pytest.approx(expected.item(), rel=1e-14)
    tensor[0, 0] = float("inf")
    assert sum_of_squares(tensor).isinf()


@THOROUGH
def test_an_accelerators_slices_of_the_loss_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated accelerator losses and gradients do not depend on `SLICE_ELEMENTS`."""
    model = ZeroTPForCausalLM(
        config_of("gpt2", LAYERS, LENGTH, kv_heads=2), grid(1, False), seed=1
    ).train()
    tokens = torch.randint(
        VOCABULARY, (1, BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    made: list[int] = []
    found = []
    original = loss._to_probabilities_

    def counted(logits: Tensor, *others: object) -> None:
        made[-1] += 1
        original(logits, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(loss, "_to_probabilities_", counted)
    for elements in (loss.SLICE_ELEMENTS, VOCABULARY, 7 * VOCABULARY, None):
        monkeypatch.setattr(loss, "SLICE_ELEMENTS", elements)
        made.append(0)
        found.append(run_simulated(model, tokens, "late", {}, {"mode": "none"}).values)
    positions = BATCH * LENGTH
    assert made == [1, positions, -(-positions // 7), 1]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[name], values) for name, values in found[0].items())
