"""A spike skips a step as DeepSpeed skips one whose gradients are not finite."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.pools import Pools
from tests.support.settings import replica, rows
from tests.tiers import in_tiers
from zero_tp.base.settings.schema import Spike
from zero_tp.engine.zero.veto import StepVeto, detect_spike


@contextmanager
def scaled_gradients(engine: Any, factor: float) -> Iterator[None]:
    """Multiply every gradient of the steps inside."""
    hooks = [
        parameter.register_hook(lambda gradient: factor * gradient)
        for parameter in engine.model.parameters()
    ]
    yield
    for hook in hooks:
        hook.remove()


def spikes(is_spike: bool) -> Any:
    """What finds a spike in this step, or none."""

    def finds_spike(veto: StepVeto, norm: Tensor) -> bool:
        veto.norm, veto.spike = (norm, "a spike") if is_spike else (None, "")
        return is_spike

    return finds_spike


def skipped_both_ways(stage: int, dtype: str) -> list[Any]:
    """A run that skips step 3 by a veto and one whose gradients are not finite there: what is
    left of each.
    """
    found = []
    for way in ("veto", "nan"):
        engine = replica(stage, dtype, tensor=2, spike=Spike(loss=6))
        state: list[Any] = []
        for step in range(1, 6):
            with (
                mock.patch.object(StepVeto, "finds_spike", spikes(way == "veto" and step == 3)),
                scaled_gradients(engine, math.nan if way == "nan" and step == 3 else 1.0),
            ):
                engine.train_step(rows(engine, step))
            states = engine.zero.states()
            tensors = [
                states.get(fragment, kind).clone()
                for kind in states.kinds()
                for fragment in states.fragments
            ]
            state.append(
                (engine.zero.progress(), tensors, engine.zero.veto.norm is not None, engine.skipped)
            )
        found.append(state)
    return found


def skipped_in_fp16(stage: int) -> list[Any]:
    from tests.support.settings import fp16_supported

    with fp16_supported():
        return skipped_both_ways(stage, "fp16")


@pytest.mark.parametrize("stage", in_tiers([0, 1, 2, 3], [1]))
def test_a_veto_leaves_the_loss_scale(ranks: Pools, stage: int) -> None:
    for vetoed, overflown in ranks(4).run(skipped_in_fp16, stage):
        scales = [
            [step[0].pop("loss_scale")["cur_scale"] for step in run] for run in (vetoed, overflown)
        ]
        assert scales == [[16.0] * 5, [16.0, 16.0, 8.0, 8.0, 8.0]]
        for ours, theirs in zip(vetoed[:3], overflown[:3], strict=True):
            assert ours[0] == theirs[0]
            assert all(
                torch.equal(one, other) for one, other in zip(ours[1], theirs[1], strict=True)
            )


SKIPPED = [
    *((stage, dtype) for stage in (0, 1, 2, 3) for dtype in ("fp32", "bf16")),
    (1, "bf16_fp32_accumulation"),
]
FIRST_SKIPPED = [(0, "bf16"), (3, "fp32")]


@pytest.mark.parametrize(("stage", "dtype"), in_tiers(SKIPPED, FIRST_SKIPPED))
def test_a_veto_skips_a_step_as_deepspeed_skips_one(ranks: Pools, stage: int, dtype: str) -> None:
    for vetoed, not_finite in ranks(4).run(skipped_both_ways, stage, dtype):
        for step, (ours, theirs) in enumerate(zip(vetoed, not_finite, strict=True), 1):
            assert ours[0] == theirs[0] and ours[0]["counters"]["skipped_steps"] == int(step >= 3)
            assert all(
                torch.equal(one, other) for one, other in zip(ours[1], theirs[1], strict=True)
            )
            assert (ours[2:], theirs[2:]) == (((step == 3), False), (False, (step == 3)))
        assert not all(
            torch.equal(one, other) for one, other in zip(vetoed[1][1], vetoed[3][1], strict=True)
        )


def spiking(resumed_after: int) -> tuple[list[str], list[float], list[int]]:
    """Which steps were skipped as spikes of a run with one odd step, resumed after a step; its
    losses and counters.
    """
    spike = Spike(loss=3, grad_norm=3, window=6)
    engine = replica(1, spike=spike)
    spikes, losses = [], []
    for step in range(1, 15):
        with scaled_gradients(engine, 100.0 if step == 11 else 1.0):
            losses.append(engine.train_step(rows(engine)))
        spikes.append(engine.spike)
        if step == resumed_after:
            progress = json.loads(json.dumps(engine.zero.progress()))
            engine.zero.veto.recent = []
            engine.zero.restore_progress(progress)
    return (
        spikes,
        losses,
        [engine.deepspeed_engine.skipped_steps, engine.deepspeed_engine.global_steps],
    )


def test_a_spike_is_skipped_alike_on_a_run_and_one_that_was_resumed(ranks: Pools) -> None:
    whole, resumed = ranks(2).run(spiking, 0), ranks(2).run(spiking, 9)
    assert whole == resumed and whole[0] == whole[1]
    spikes, losses, counters = whole[0]
    assert spikes[10].startswith("its gradient norm ") and not any(spikes[:10]), (spikes, losses)
    assert counters == [sum(map(bool, spikes)), 14]


def test_the_bound_follows_what_came_before() -> None:
    recent: list[list[float]] = []
    values = [3.0, 3.1, 9.9, 2.9, 3.0, 9.0, 3.0, 2.8, 3.1, 3.0, 3.3]
    for index, value in enumerate(values):
        before = values[max(0, index - 6) : index]
        expected = len(before) >= 3 and value > statistics.fmean(before) + 2 * statistics.stdev(
            before
        )
        assert bool(detect_spike(Spike(loss=2, window=6), recent, value, 1.0)) == expected, index
    assert len(recent) == 6
