"""The largest scores of heads against all scores, and the bounds that spare them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.settings import gpt2_config
from zero_tp.model import attention_scores
from zero_tp.model.attention import AttentionCore
from zero_tp.model.attention_scores import (
    AttentionScores,
    largest_scores,
    log_sum_exps,
    norm_bounds,
)
from zero_tp.model.causal_lm import CausalLM
from zero_tp.model.context import AttentionMask, PackedSequences, VarlenMask

BATCH, HEADS, LENGTH, SIZE = 2, 3, 12, 4
PACKED = PackedSequences.from_document_ids(
    torch.tensor([[0] * 5 + [1] * 7, [0] * 12]), torch.device("cpu")
)


def drawn(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (
        torch.randn(BATCH, HEADS, LENGTH, SIZE, generator=draw),
        torch.randn(BATCH, LENGTH, SIZE, generator=draw),
    )


@pytest.mark.parametrize("slice_size", [1, 200, 2**22])
@pytest.mark.parametrize(
    "mask",
    [
        AttentionMask(LENGTH, LENGTH),
        AttentionMask(LENGTH, LENGTH, window=3),
        AttentionMask(LENGTH, LENGTH, packed=PACKED),
        AttentionMask(LENGTH, LENGTH, packed=PACKED, window=4),
    ],
    ids=["causal", "window", "documents", "both"],
)
def test_only_visible_scores_count(mask: AttentionMask, slice_size: int) -> None:
    """Whatever a core's mask: an additive one of either core, documents and windows, or none."""
    query, key = drawn()
    scores = query @ key[:, None].transpose(-1, -2) * 0.5
    visible = mask.visible(query.device)
    expected = scores.masked_fill(~visible, -torch.inf).amax((0, 2, 3))
    packed = mask.packed or PackedSequences.one_per_row(BATCH, LENGTH, query.device)
    additive = torch.zeros(visible.shape)
    forms: list[Any] = [
        additive.masked_fill(~visible, AttentionCore.hidden_score(query.dtype)),
        additive.masked_fill(~visible, torch.finfo(torch.float32).min),
        VarlenMask(packed, -1 if mask.window is None else mask.window - 1),
        *([None] if mask.is_plain else []),
    ]
    with patch.object(attention_scores, "SLICE", slice_size):
        for form in forms:
            torch.testing.assert_close(largest_scores(query, key, 0.5, form), expected)


def test_both_bounds_are_above_the_largest_score() -> None:
    query, key = drawn(3)
    largest = largest_scores(query, key, 0.5, None)
    keys = key[:, None].expand_as(query).contiguous().requires_grad_()
    attended = F.scaled_dot_product_attention(query, keys, keys, is_causal=True)
    log_sums = log_sum_exps(attended)
    assert log_sums is not None
    assert bool((largest <= log_sums).all()) and bool((log_sums <= largest + 2.5).all())
    assert bool((largest <= norm_bounds(query, keys, 0.5)).all())
    with sdpa_kernel(SDPBackend.MATH):
        attended = F.scaled_dot_product_attention(query, keys, keys, is_causal=True)
    assert log_sum_exps(attended) is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_scores_are_computed_for_heads_above_a_bound_alone(attention: str) -> None:
    """And neither without a graph nor outside `recording()`."""
    model = CausalLM(gpt2_config(_attn_implementation=attention), seed=5)
    tokens = torch.arange(20)[None] % 61
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    for threshold, computed in ((1e-3, True), (1e3, False)):
        scores = AttentionScores(model.transformer, threshold, 4, torch.device("cpu"))
        with patch.object(attention_scores, "largest_scores", wraps=largest_scores) as products:
            model(tokens)
            with scores.recording(), torch.no_grad():
                model(tokens)
            assert not products.called and bool(scores.take().isneginf().all())
            with scores.recording():
                model(tokens)
        assert products.called == computed
        assert bool(scores.take().isneginf().all()) != computed
        assert bool(scores.largest.isneginf().all())
