"""What torch really allocates on a CPU, its kernels' own copies included."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def largest_allocation(run: Callable[[], object]) -> int:
    """Return the bytes of the largest block that `run` allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")
