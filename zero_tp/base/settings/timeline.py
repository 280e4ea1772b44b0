"""Which samples and tokens each step of a run trains on: its stages, and the ramp of its batch.

Everything is computed from the step's number alone, so a resume needs no other state.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from zero_tp.base.settings.schema import BatchRampUp


@dataclass(frozen=True)
class StageSize:
    """The length of a stage, and the size of its steps.

    One of `steps`, `tokens` and `until` is not None.

    Attributes:
        until: where the stage ends, as a share of the run's steps or tokens.
        samples: its full global batch. length: tokens of a sample.
        ramp: how the batch grows to `samples`; it counts the tokens of the stage or of the run.
        own_ramp: the ramp is the stage's, and counts its tokens.
        continues: its samples go on in the sequence of the stage before.
    """

    samples: int
    length: int
    steps: int | None = None
    tokens: int | None = None
    until: float | None = None
    ramp: BatchRampUp | None = None
    own_ramp: bool = False
    continues: bool = False


class StepSamples(NamedTuple):
    """The samples of one step.

    Attributes:
        stage: index of the step's stage. sequence: index of the sequence of its samples.
        first: number in that sequence of the step's first sample. samples: the global batch.
        samples_before, tokens_before: those that the run has consumed before this step.
    """

    stage: int
    sequence: int
    first: int
    samples: int
    length: int
    samples_before: int
    tokens_before: int

    @property
    def tokens(self) -> int:
        """Return the tokens of the step."""
        return self.samples * self.length


class _Segment(NamedTuple):
    """Steps of one stage with the same batch: `steps` of them, from `first_step` on.

    `begin` has the samples of the first of them.
    """

    first_step: int
    steps: int
    begin: StepSamples

    def step(self, step: int) -> StepSamples:
        begin = self.begin
        before = (step - self.first_step) * begin.samples
        return begin._replace(
            first=begin.first + before,
            samples_before=begin.samples_before + before,
            tokens_before=begin.tokens_before + before * begin.length,
        )


class Timeline:
    """The steps of a run, from 1 on.

    Two stages, 4 steps of rows of 2 tokens and 2 steps of rows of 4, and a batch of 2 that grows by
    1 to 4 over 12 tokens, so at 6 and at 12:

        step             1    2    3    4    5    6
        stage            0    0    0    0    1    1
        batch            2    2    3    4    4    4
        tokens before    0    4    8    14   22   38

    Args:
        stages: at least one.
        total_steps, total_tokens: of the run, as a share of which `until` counts.

    Attributes:
        first_steps: of each stage, and at last that after the run.
        sequence_ends: number of samples of each sequence.
    """

    def __init__(
        self,
        stages: Sequence[StageSize],
        total_steps: int | None = None,
        total_tokens: int | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self._total_steps = total_steps
        self._total_tokens = total_tokens
        self._segments: list[_Segment] = []
        self.first_steps = [1]
        self.sequence_ends: list[int] = []
        self._next = StepSamples(0, 0, 0, 0, 0, 0, 0)
        for index, size in enumerate(self.stages):
            self._add_stage(index, size)
        self.sequence_ends.append(self._next.first)
        self._starts = [segment.first_step for segment in self._segments]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline) and self._arguments == other._arguments

    def __hash__(self) -> int:
        return hash(self._arguments)

    @property
    def _arguments(self) -> tuple[Any, ...]:
        return self.stages, self._total_steps, self._total_tokens

    @property
    def steps(self) -> int:
        """Return the number of steps of the run."""
        return self.first_steps[-1] - 1

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the run."""
        return self._next.tokens_before

    def step_samples(self, step: int) -> StepSamples:
        """Return the samples of a step; after the last one, what the next would begin with."""
        assert step >= 1
        if step > self.steps:
            return self._next
        return self._segments[bisect_right(self._starts, step) - 1].step(step)

    def stage_steps(self, stage: int) -> range:
        """Return the steps of a stage."""
        return range(self.first_steps[stage], self.first_steps[stage + 1])

    def stage_of(self, step: int) -> int:
        """Return the index of a step's stage; after the last step, that of the last stage."""
        return self.step_samples(step).stage

    def stage_tokens(self, stage: int) -> int:
        """Return the number of tokens of a stage."""
        steps = self.stage_steps(stage)
        return (
            self.step_samples(steps.stop).tokens_before
            - self.step_samples(steps.start).tokens_before
        )

    def steps_from(self, step: int, tokens: int) -> int:
        """Return how many steps from `step` on consume `tokens`, rounded up.

        After the run's last step the batch stays the same.
        """
        goal = self.step_samples(step).tokens_before + tokens
        if goal > self.tokens:
            left = goal - max(self.tokens, self.step_samples(step).tokens_before)
            return max(0, self.steps + 1 - step) + math.ceil(left / self._segments[-1].begin.tokens)
        return self._first_step_after(goal) - step

    def steps_until(self, last: int, tokens: int) -> int:
        """Return how many steps up to `last`, it included, consume `tokens`, rounded up."""
        goal = self.step_samples(last + 1).tokens_before - tokens
        return last + 1 - self._last_step_before(goal)

    def _first_step_after(self, tokens: int) -> int:
        """Return the first step before which at least `tokens` are consumed."""
        for segment in self._segments:
            begin = segment.begin
            if begin.tokens_before + segment.steps * begin.tokens >= tokens:
                return segment.first_step + math.ceil((tokens - begin.tokens_before) / begin.tokens)
        return self.steps + 1

    def _last_step_before(self, tokens: int) -> int:
        """Return the last step before which at most `tokens` are consumed."""
        for segment in reversed(self._segments):
            begin = segment.begin
            if begin.tokens_before <= tokens:
                return segment.first_step + (tokens - begin.tokens_before) // begin.tokens
        return 1

    def _add_stage(self, index: int, size: StageSize) -> None:
        if index and not size.continues:
            self.sequence_ends.append(self._next.first)
            self._next = self._next._replace(sequence=self._next.sequence + 1, first=0)
        origin = self._next.tokens_before
        step = self.first_steps[-1]
        end_step, end_tokens = self._end_of(size, step, origin)
        while step < end_step and self._next.tokens_before < end_tokens:
            consumed = self._next.tokens_before - (origin if size.own_ramp else 0)
            samples, until_change = _ramped_batch(size, consumed)
            begin = self._next._replace(stage=index, samples=samples, length=size.length)
            left = min(until_change, end_tokens - begin.tokens_before)
            steps = min(end_step - step, left if left == math.inf else -(-left // begin.tokens))
            segment = _Segment(step, int(steps), begin)
            self._segments.append(segment)
            step += segment.steps
            self._next = segment.step(step)
        self.first_steps.append(step)

    def _end_of(self, size: StageSize, step: int, origin: int) -> tuple[float, float]:
        """Return (the step after a stage, the run's tokens at its end); one of them is infinite.

        The stage begins with `step`, after `origin` tokens.
        """
        if size.steps is not None:
            return step + size.steps, math.inf
        if size.tokens is not None:
            return math.inf, origin + size.tokens
        assert size.until is not None
        # Decimal, because 0.07 · 100 is above 7 in binary, and rounding up would make it 8.
        share = Decimal(str(size.until))
        if self._total_steps is not None:
            return math.ceil(share * self._total_steps) + 1, math.inf
        assert self._total_tokens is not None
        return math.inf, math.ceil(share * self._total_tokens)


def _ramped_batch(size: StageSize, consumed: int) -> tuple[int, float]:
    """Return the batch after `consumed` tokens of its ramp, and the tokens until it grows.

    From 2 to 4 by 1 over 12 tokens: 2 from 0 on, 3 from 6 on, 4 from 12 on.
    """
    ramp = size.ramp
    if ramp is None:
        return size.samples, math.inf
    increments = (size.samples - ramp.start) // ramp.increment
    level = consumed * increments // ramp.tokens
    if level >= increments:
        return size.samples, math.inf
    change = -(-(level + 1) * ramp.tokens // increments)
    return ramp.start + level * ramp.increment, change - consumed
