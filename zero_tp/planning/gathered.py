"""Count the parameters that ZeRO-3 has gathered while each module runs.

It follows `PartitionedParameterCoordinator` of deepspeed/runtime/zero/partitioned_param_coordinator.py.

From its second step on DeepSpeed knows the order of modules. Before a module runs, its parameters and those of the next
modules, up to the prefetch bucket, are gathered; after it, they go unless they are wanted again within
`max_reuse_distance` elements. Parameters up to the persistence threshold are never partitioned and not counted here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

Name = tuple[int, int]
"""(module, position in it) of a parameter."""


@lru_cache(maxsize=256)
def most_gathered(
    modules: tuple[tuple[int, ...], ...],
    layers: tuple[int, ...],
    *,
    threshold: int,
    prefetch: int,
    max_live: int,
    max_reuse: int,
) -> dict[tuple[str, int], float]:
    """Return the most elements gathered by ("forward" or "backward", the layer's number).

    Args:
        modules: elements of each parameter of each module, in forward's order. A parameter of more than one module
            (tied embeddings: of the first and the last) is counted with both.
        layers: of each module: the layer's number, -1 before the first and L after the last.
    """
    coordinator = _Coordinator(modules, threshold, prefetch, max_live, max_reuse)
    count, most = len(modules), dict[tuple[str, int], float]()
    for step, module in enumerate(coordinator.order):
        coordinator.fetch(step)
        coordinator.prefetch(step)
        if layers[module] != layers[-1] or module == count - 1:  # the loss; the final norm is small compared with it
            key = "forward" if step < count else "backward", layers[module]
            most[key] = max(most.get(key, 0.0), float(coordinator.separate + coordinator.buffered))
        coordinator.release(step)
    return most


@dataclass
class _Flight:
    """Parameters prefetched together into one buffer.

    The first use of one of them copies all out of the buffer, which is freed when all have been used.
    """

    size: int
    uncopied: int
    waiting: set[Name]


class _Coordinator:
    """DeepSpeed's coordinator in one step: each module runs forward, then backward in reverse order.

    Attributes:
        order: the module of each step.
        separate, buffered: elements gathered into tensors of their own, and into buffers of several parameters.
    """

    def __init__(
        self, modules: tuple[tuple[int, ...], ...], threshold: int, prefetch: int, max_live: int, max_reuse: int
    ):
        count = len(modules)
        self.order = [*range(count), *reversed(range(count))]
        self.separate = self.buffered = 0
        self._limits = prefetch, max_live, max_reuse
        self._sizes = {(number, at): size for number, sizes in enumerate(modules) for at, size in enumerate(sizes)}
        names = [[(number, at) for at in range(len(sizes))] for number, sizes in enumerate(modules)]
        if count > 1 and len(modules[-1]) == 1 and modules[-1] == modules[0]:
            names[-1] = [(0, 0)]  # tied: the output layer has the embedding's parameter
        self._partitioned = [[name for name in own if self._sizes[name] > threshold] for own in names]
        self._passed = list(accumulate((sum(modules[number]) for number in self.order), initial=0))
        self._queue = deque(
            (step, name) for step, number in enumerate(self.order) for name in self._partitioned[number]
        )
        self._uses: dict[Name, deque[int]] = {}
        for step, name in self._queue:
            self._uses.setdefault(name, deque()).append(step)
        self._live = 0
        self._available: set[Name] = set()
        self._fetched_for: dict[Name, int] = {}
        self._flights: dict[Name, _Flight] = {}

    def fetch(self, step: int) -> None:
        """Gather the parameters of the step's module, or wait for those that were prefetched."""
        for name in self._partitioned[self.order[step]]:
            self._uses[name].popleft()
            if name not in self._available:
                self._available.add(name)
                self._live += self._sizes[name]
                self.separate += self._sizes[name]
            elif name in self._flights:
                flight = self._flights.pop(name)
                self.separate += flight.uncopied
                flight.uncopied = 0
                flight.waiting.discard(name)
                self.buffered -= 0 if flight.waiting else flight.size

    def prefetch(self, step: int) -> None:
        """Gather parameters of the next modules, together."""
        bucket, max_live, _ = self._limits
        while self._queue and self._queue[0][0] <= step:
            self._queue.popleft()
        ahead, size, limit = list[Name](), 0, min(max_live - self._live, bucket)
        while self._queue and size < limit:
            wanted, name = self._queue.popleft()
            self._fetched_for[name] = wanted
            if name not in self._available:
                self._available.add(name)
                ahead.append(name)
                size += self._sizes[name]
        self._live += size
        if len(ahead) == 1:
            self.separate += size  # gathered without a buffer
        elif ahead:
            self.buffered += size
            self._flights |= dict.fromkeys(ahead, _Flight(size, size, set(ahead)))

    def release(self, step: int) -> None:
        """Free the parameters of the step's module that no module needs soon."""
        for name in self._partitioned[self.order[step]]:
            next_uses = self._uses[name]
            skipped = self._fetched_for.get(name, -1) > step
            near = bool(next_uses) and self._passed[next_uses[0]] - self._passed[step + 1] < self._limits[2]
            if not skipped and not near and name in self._available:
                self._available.remove(name)
                self._live -= self._sizes[name]
                self.separate -= self._sizes[name]
