"""Record the memory of a run's steps, or time them, on ranks started for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch.distributed as dist

from benchmarks.papers.allocator import Event
from benchmarks.papers.engines import drawn, engine_of
from benchmarks.papers.ranks import on_ranks
from benchmarks.papers.step_memory import followed, points
from zero_tp.run.config import RunConfig
from zero_tp.run.process.quiet import suppress_output
from zero_tp.tools.planning.memory import CATEGORIES, Point, RankMemory, rank_memory
from zero_tp.tools.planning.plan_settings import workload_of
from zero_tp.tools.planning.tracking import Allocations

Steps = dict[str, Sequence[Point]]
"""The memory points of a new run's first step, and of a later one."""
WARM_UP = 2
TIMED = 8


class Followed(NamedTuple):
    """The memory points of one rank's step, and its allocations and frees for `replay`."""

    points: list[Point]
    events: list[Event]


def followed_steps(config: RunConfig) -> list[list[Followed]]:
    """Run the first two steps of a run; return the records of both, by rank."""
    assert config.world_size is not None
    return on_ranks(_two_steps, config.world_size, config)


def measured_steps(config: RunConfig) -> Steps:
    """Return the points of the first two steps of a run's first rank."""
    first, second = followed_steps(config)[0]
    return {"first step": first.points, "second step": second.points}


def after_forward(step: Sequence[Point]) -> dict[str, float]:
    """Return the bytes by category at the end of the last forward."""
    return [point for point in step if point.phase == "forward"][-1].bytes


def most_in_backward(step: Sequence[Point]) -> dict[str, float]:
    """Return the most bytes of each category in backward."""
    backward = [point.bytes for point in step if point.phase == "backward"]
    return {name: max(each[name] for each in backward) for name in CATEGORIES}


def planned_steps(config: RunConfig, *, cpu: bool) -> Steps:
    memory = rank_memory(config, workload_of(config, cpu=cpu))
    return {"first step": first_step(memory), "later steps": memory.points}


def first_step(memory: RankMemory) -> list[Point]:
    """Return the points of a new run's first step: the optimizer allocates its moments in its
    update.
    """
    settings = replace(memory.zero.settings, moments=0, matrix_moments=0)
    before = replace(memory.zero, settings=settings)
    *points, update, end = memory.points
    if settings.iteration is not None or settings.runs_adamw_update:
        update = memory.point("step", update.position, memory.zero.in_first_update())
    return [*replace(memory, zero=before).points[: len(points)], update, end]


def _two_steps(config: RunConfig) -> list[Followed]:
    with suppress_output():
        engine = engine_of(config)
        batches = drawn(config)
    records = []
    for _ in range(2):
        with followed(engine) as allocations:
            begin = allocations.clock
            engine.train_step(batches)
        records.append(Followed(points(allocations, begin), events(allocations)))
    return records


def events(allocations: Allocations) -> list[Event]:
    """Return the allocations and frees of all storages in order."""
    return [
        (id(one), one.bytes if sign > 0 else 0)
        for _, one, sign in allocations.timeline()
        if one.bytes or sign < 0
    ]


def step_seconds(config: RunConfig) -> float:
    """Return the seconds of the fastest of several steps on this rank; other work on the machine
    slows the others down.

    Collective.
    """
    with suppress_output():
        engine = engine_of(config)
        batches = drawn(config)
    records = []
    for _ in range(WARM_UP + TIMED):
        dist.barrier()
        begin = time.perf_counter()
        engine.train_step(batches)
        dist.barrier()
        records.append(time.perf_counter() - begin)
    engine.deepspeed_engine.destroy()
    return min(records[WARM_UP:])
