"""Count the parameters that ZeRO-3 has gathered while each module runs.

It follows `PartitionedParameterCoordinator` of deepspeed/runtime/zero/partitioned_param_coordinator.py.

From its second step on DeepSpeed knows the order of modules. Before a module runs, its parameters and those of the next
modules, up to the prefetch bucket, are gathered; after it, they go unless they are wanted again within
`max_reuse_distance` elements. Parameters up to the persistence threshold are never partitioned and not counted here.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

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
    count = len(modules)
    order = list(range(count)) + list(reversed(range(count)))
    # A parameter is (module, position); the tied embedding is that of the first module.
    sizes = {(module, at): size for module in range(count) for at, size in enumerate(modules[module])}
    tied = count > 1 and len(modules[-1]) == 1 and modules[-1] == modules[0]
    names = [[(0, 0)] if tied and module == count - 1 else [(module, at) for at in range(len(modules[module]))]
             for module in range(count)]  # fmt: skip
    partitioned = [[name for name in names[module] if sizes[name] > threshold] for module in range(count)]
    passed = [0]
    for module in order:
        passed.append(passed[-1] + sum(modules[module]))
    uses: dict[Name, deque[int]] = {}
    queue: deque[tuple[int, Name]] = deque()
    for step, module in enumerate(order):
        for name in partitioned[module]:
            uses.setdefault(name, deque()).append(step)
            queue.append((step, name))
    available: set[Name] = set()
    fetched_for: dict[Name, int] = {}
    flights: dict[Name, _Flight] = {}
    own = flat = live = 0
    most: dict[tuple[str, int], float] = {}
    for step, module in enumerate(order):
        for name in partitioned[module]:
            uses[name].popleft()
            if name not in available:
                available.add(name)
                live += sizes[name]
                own += sizes[name]
            elif name in flights:
                flight = flights.pop(name)
                own += flight.land()
                flight.waiting.discard(name)
                flat -= 0 if flight.waiting else flight.size
        while queue and queue[0][0] <= step:
            queue.popleft()
        ahead: list[Name] = []
        limit = min(max_live - live, prefetch)
        while queue and sum(sizes[each] for each in ahead) < limit:
            wanted, name = queue.popleft()
            fetched_for[name] = wanted
            if name not in available:
                available.add(name)
                ahead.append(name)
        fetching = sum(sizes[each] for each in ahead)
        live += fetching
        if len(ahead) == 1:
            own += fetching  # gathered without a buffer
        elif ahead:
            flight = _Flight(fetching, set(ahead))
            flat += fetching
            flights |= dict.fromkeys(ahead, flight)
        if layers[module] != layers[-1] or module == count - 1:  # the loss, beside which the final norm is small
            where = "forward" if step < count else "backward", layers[module]
            most[where] = max(most.get(where, 0.0), float(own + flat))
        for name in partitioned[module]:
            coming = uses[name]
            skipped = fetched_for.get(name, -1) > step
            near = bool(coming) and passed[coming[0]] - passed[step + 1] < max_reuse
            if not skipped and not near and name in available:
                available.remove(name)
                live -= sizes[name]
                own -= sizes[name]
    return most


class _Flight:
    """A flight is parameters prefetched together into one buffer; the first use of one of them copies each out of it.

    The buffer goes when all have been used.
    """

    def __init__(self, size: int, waiting: set[Name]):
        self.size, self.waiting, self._landed = size, waiting, False

    def land(self) -> int:
        """Return the elements that the copies take: all at the first call, none after it."""
        copied, self._landed = 0 if self._landed else self.size, True
        return copied
