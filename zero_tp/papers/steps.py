"""Whole steps of a run are followed by their memory or timed, on ranks that are started for it."""

from __future__ import annotations

import statistics
import time

import torch.distributed as dist

from zero_tp.config import RunConfig
from zero_tp.papers.engines import drawn, engine_of
from zero_tp.papers.ranks import on_ranks
from zero_tp.planning.memory import Point, rank_memory
from zero_tp.planning.profile import followed, points
from zero_tp.process.quiet import hushed
from zero_tp.training.engine import TrainingEngine

Steps = dict[str, list[Point]]
"""The points of a new run's first step, and of a later one."""
WARM_UP, TIMED = 2, 8


def measured_steps(config: RunConfig) -> Steps:
    """Run the first two steps of a run, and follow the memory of its first rank."""
    assert config.world_size is not None
    first, second = on_ranks(_two_steps, config.world_size, config)[0]
    return {"first step": first, "second step": second}


def planned_steps(config: RunConfig, *, cpu: bool) -> Steps:
    memory = rank_memory(config, cpu=cpu)
    return {"first step": memory.first_points, "later steps": memory.points}


def _two_steps(config: RunConfig) -> list[list[Point]]:
    engine, batches = _quiet(config), drawn(config)
    found = []
    for _ in range(2):
        with followed(engine) as allocations:
            begin = allocations.clock
            engine.train_step(batches)
        found.append(points(allocations, begin))
    return found


def _quiet(config: RunConfig) -> TrainingEngine:
    with hushed():
        return engine_of(config)


def step_seconds(config: RunConfig) -> float:
    """Return the median seconds of a step of a run on this rank. Collective."""
    engine, batches = _quiet(config), drawn(config)
    found = []
    for _ in range(WARM_UP + TIMED):
        dist.barrier()
        begin = time.perf_counter()
        engine.train_step(batches)
        dist.barrier()
        found.append(time.perf_counter() - begin)
    engine.engine.destroy()
    return statistics.median(found[WARM_UP:])
