"""What each step of a run trains on, against a loop over its steps and tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from tests.tiers import seeds_in_tiers
from zero_tp.base.settings.schema import BatchRampUp
from zero_tp.base.settings.timeline import StageSize, StepSamples, Timeline


def looped(
    stages: Sequence[StageSize], total_steps: int | None, total_tokens: int | None
) -> list[StepSamples]:
    """Return the samples of each step, one after another, by the documented rules."""
    found: list[StepSamples] = []
    samples = tokens = sequence = first = 0
    for index, size in enumerate(stages):
        if index and not size.continues:
            sequence, first = sequence + 1, 0
        origin, steps = tokens, 0
        share = None if size.until is None else Fraction(str(size.until))
        while not (
            (size.steps is not None and steps >= size.steps)
            or (size.tokens is not None and tokens - origin >= size.tokens)
            or (share is not None and total_steps and len(found) >= share * total_steps)
            or (share is not None and total_tokens and tokens >= share * total_tokens)
        ):
            batch = size.samples
            if size.ramp is not None:
                increments = (size.samples - size.ramp.start) // size.ramp.increment
                consumed = tokens - origin if size.own_ramp else tokens
                grown = size.ramp.increment * (consumed * increments // size.ramp.tokens)
                batch = min(batch, size.ramp.start + grown)
            found.append(StepSamples(index, sequence, first, batch, size.length, samples, tokens))
            first, samples, tokens = first + batch, samples + batch, tokens + batch * size.length
            steps += 1
    return found


def drawn_stage(draw: random.Random) -> StageSize:
    full = draw.randint(2, 9)
    ramp = None
    if draw.random() < 0.5:
        increment = draw.randint(1, full - 1)
        start = full - increment * draw.randint(1, (full - 1) // increment)
        ramp = BatchRampUp(start=start, increment=increment, tokens=draw.randint(1, 300))
    size = StageSize(
        full,
        draw.randint(1, 9),
        ramp=ramp,
        own_ramp=draw.random() < 0.5,
        continues=draw.random() < 0.5,
    )
    lengths = {
        "steps": draw.randint(1, 20),
        "tokens": draw.randint(1, 500),
        "until": round(draw.uniform(0.01, 1), 2),
    }
    kind = draw.choice([*lengths])
    return StageSize(**{**vars(size), kind: lengths[kind]})


@pytest.mark.parametrize("seed", seeds_in_tiers(range(4), 40, 200))
def test_steps_are_those_of_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        total_tokens = draw.choice([None, draw.randint(1, 2000)])
        total_steps = None if total_tokens else draw.randint(1, 60)
        stages = [drawn_stage(draw) for _ in range(draw.randint(1, 4))]
        timeline = Timeline(stages, total_steps, total_tokens)
        steps = looped(stages, total_steps, total_tokens)
        assert [timeline.step_samples(step) for step in range(1, timeline.steps + 1)] == steps
        ends = [*(step.tokens_before for step in steps), timeline.tokens]
        for _ in range(5 if steps else 0):
            step, tokens = draw.randint(1, len(steps)), draw.randint(1, 200)
            later = [n for n, end in enumerate(ends[step - 1 :]) if end >= ends[step - 1] + tokens]
            if later:
                assert timeline.steps_from(step, tokens) == later[0]
            enough = [n for n in range(step + 1) if ends[step] - ends[step - n] >= tokens]
            assert timeline.steps_until(step, tokens) == (enough[0] if enough else step)


def test_a_share_of_a_length_is_exact() -> None:
    """0.07 · 100 is above 7 in binary."""
    assert 0.07 * 100 > 7
    stages = [StageSize(1, 1, until=0.07), StageSize(1, 1, until=1.0)]
    assert Timeline(stages, total_steps=100).first_steps == [1, 8, 101]
    assert Timeline(stages, total_tokens=100).first_steps == [1, 8, 101]
