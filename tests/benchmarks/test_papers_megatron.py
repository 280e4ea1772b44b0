"""Megatron-LM's results, measured in small."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.papers import megatron, megatron_norms, megatron_training
from benchmarks.papers.megatron_training import SIZES, learnt, losses_by_tensor, texts_in
from tests.tiers import THOROUGH

# What the benchmarks publish.
pytestmark = THOROUGH


def test_transformers_counts_the_same_parameters() -> None:
    rows = [row for table in megatron.sizes(measured=True).tables.values() for row in table]
    assert len(rows) == 8 and all(row.measured == row.planned for row in rows)


def test_efficiencies_are_near_those_published() -> None:
    """Within 5 points, and the FLOP/s and the speed-up of 1.2 B within 7 %."""
    rows = [
        row
        for table in megatron.scaling(measured=False).tables.values()
        for row in table
        if row.published
    ]
    assert len(rows) == 6
    for row in rows:
        near = {"abs": 5} if row.unit == "%" else {"rel": 0.07}
        assert row.planned == pytest.approx(row.published, **near), row.label


def test_every_tensor_size_learns_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_training, "STEPS", 24)
    *ours, (_, plain) = losses_by_tensor(tmp_path).items()
    assert [name for name, _ in ours] == ["TP 1", "TP 2", "TP 4"] and len(plain) == 24
    for name, losses in ours:
        assert losses == pytest.approx(plain, abs=2e-5), name
    assert plain[-1] < plain[0] - 0.1


def test_a_size_is_trained_and_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_training, "STEPS", 24)
    rows, losses = learnt(next(iter(SIZES)), texts_in(tmp_path), tmp_path / "run")
    loss, perplexity, right = (row.measured or 0 for row in rows)
    assert losses[-1] < losses[0] and loss < losses[0]
    assert perplexity > 1 and 0 <= right <= 100


def test_both_orders_of_layer_norm_are_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_norms, "STEPS", 32)
    corpus, unigram = megatron_norms.corpus_in(tmp_path)
    for order in megatron_norms.ORDERS:
        (loss, right), losses = megatron_norms.learnt(order, 2, corpus, tmp_path / order)
        assert len(losses) == 32 and losses[-1] < losses[0]
        assert loss.measured is not None and loss.measured > unigram - 0.5
        assert right.measured is not None and 0 <= right.measured <= 100
