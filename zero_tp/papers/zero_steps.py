"""What one rank of a small run does for ZeRO's results: its bytes by category, what it sends, and how much fits it."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
from pathlib import Path

import torch.distributed as dist

from zero_tp.config import RunConfig
from zero_tp.papers.allocator import Event
from zero_tp.papers.collectives import counted
from zero_tp.papers.engines import drawn, engine_of, small_config
from zero_tp.planning.memory import CATEGORIES
from zero_tp.planning.profile import followed, points
from zero_tp.planning.tracking import Allocations
from zero_tp.topology import Topology

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # mallopt(3)


def bytes_of_a_step(*changes: str) -> tuple[dict[str, dict[str, float]], list[Event]]:
    """Return this rank's bytes in its second step, and what came and went there, for `replay`.

    Returns:
        By category: the most in backward, with what forward kept when it ended, under "backward" and "forward".
    """
    config = small_config(dist.get_world_size(), *changes)
    engine, batches = engine_of(config), drawn(config)
    engine.train_step(batches)
    with followed(engine) as allocations:
        begin = allocations.clock
        engine.train_step(batches)
    found = points(allocations, begin)
    kept = [point for point in found if point.phase == "forward"][-1].bytes
    backward = [point.bytes for point in found if point.phase == "backward"]
    most = {name: max(each[name] for each in backward) for name in CATEGORIES}
    return {"forward": kept, "backward": most, "end": backward[-1]}, events(allocations)


def events(allocations: Allocations) -> list[Event]:
    """Return the makings and goings of all storages in order."""
    return [(id(one), one.bytes if sign > 0 else 0) for _, one, sign in allocations.timeline() if one.bytes or sign < 0]


# ---- what is sent ----------------------------------------------------------------------------------------------------


def elements_sent(*changes: str) -> dict[str, float]:
    """Return, by collective, the elements that this rank sends in its second step; see `counted`."""
    config = small_config(dist.get_world_size(), *changes)
    engine, batches = engine_of(config), drawn(config)
    engine.train_step(batches)
    with counted() as sent:
        engine.train_step(batches)
    return sent


# ---- how much fits ---------------------------------------------------------------------------------------------------


def train_within(budget: int, full: str, *changes: str) -> None:
    """Train two steps in `budget` bytes more of address space than the process has after a step of one layer.

    Args:
        full: a file that is made where the system refuses this rank more; then it fails, and with it the others.
    """
    libc = ctypes.CDLL(None)
    # One heap, and each large tensor a mapping of its own that goes when it does.
    for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 1 << 16)):
        libc.mallopt(name, value)
    ranks = dist.get_world_size()
    config, least = small_config(ranks, *changes), small_config(ranks, *changes, "zero_tp.model.n_layer=1")
    # One for both: the threads of a group's collectives have stacks, which count as they are made.
    topology = Topology(config.zero_tp.parallel.tensor, config.zero_tp.parallel.sequence)
    _two_steps(least, topology)
    gc.collect()
    libc.malloc_trim(0)
    limit = address_space() + budget
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        _two_steps(config, topology)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            Path(full).touch()
        raise


def _two_steps(config: RunConfig, topology: Topology) -> None:
    engine, batches = engine_of(config, topology), drawn(config)
    for _ in range(2):
        assert math.isfinite(engine.train_step(batches))
    engine.engine.destroy()


def address_space() -> int:
    """Return the bytes of this process's address space."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()
