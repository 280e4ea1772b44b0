"""What one rank of a small run does for ZeRO's results: what it sends, and how much fits it."""

from __future__ import annotations

import ctypes
import gc
import math
import resource
from pathlib import Path

from benchmarks.papers.collectives import counted
from benchmarks.papers.engines import drawn, engine_of, topology_of
from zero_tp.parallel.topology import Topology
from zero_tp.run.config import RunConfig

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # mallopt(3)


def elements_sent(config: RunConfig) -> dict[str, float]:
    """Return, by collective, the elements that this rank sends in its second step; see
    `counted`.
    """
    engine = engine_of(config)
    batches = drawn(config)
    engine.train_step(batches)
    with counted() as sent:
        engine.train_step(batches)
    return sent


def train_within(budget: int, full: str, least: RunConfig, config: RunConfig) -> None:
    """Train two steps of a run in `budget` bytes more of address space than the process has after
    those of `least`.

    Args:
        full: a file that is made where the system refuses this rank more; then it fails, and with
            it the others.
    """
    libc = ctypes.CDLL(None)
    # One heap, and each large tensor a mapping of its own that goes when it does.
    for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 1 << 16)):
        libc.mallopt(name, value)
    # One for both: the threads of a group's collectives have stacks, which count as they are made.
    topology = topology_of(config)
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
    engine = engine_of(config, topology)
    batches = drawn(config)
    for _ in range(2):
        assert math.isfinite(engine.train_step(batches))
    engine.deepspeed_engine.destroy()


def address_space() -> int:
    """Return the bytes of this process's address space."""
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()
