"""Count the parameters that ZeRO-3 has gathered while each module runs.

It follows `PartitionedParameterCoordinator` of deepspeed/runtime/zero/partitioned_param_coordinator.py.

From its second step on DeepSpeed knows the order of modules. Before a module runs, its parameters and those of the next
modules, up to the prefetch bucket, are gathered; after it, they go unless they are wanted again within
`max_reuse_distance` elements. Parameters up to the persistence threshold are never partitioned and not counted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

Name = tuple[int, int]
"""(module, position in it) of a parameter."""


@lru_cache(maxsize=256)
def most_gathered(
    modules: tuple[tuple[int, ...], ...],
    layers: tuple[int, ...],
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
    coordinator = Coordinator(modules, threshold, prefetch, max_live, max_reuse)
    most: dict[tuple[str, int], float] = {}
    for step, module in enumerate(coordinator.order):
        coordinator.fetch(step)
        elements = coordinator.prefetch(step)
        # The output layer's peak is in the loss; the final norm before it is small.
        if layers[module] != layers[-1] or module == len(modules) - 1:
            key = "forward" if step < len(modules) else "backward", layers[module]
            most[key] = max(most.get(key, 0.0), float(elements))
        coordinator.release(step)
    return most


class Coordinator:
    """What is gathered over one forward and backward.

    Attributes:
        order: the module that runs at each step: all of them, and all of them in reverse.
    """

    def __init__(
        self,
        modules: Sequence[tuple[int, ...]],
        threshold: int,
        prefetch: int,
        max_live: int,
        max_reuse: int,
    ) -> None:
        count = len(modules)
        self.order = [*range(count), *reversed(range(count))]
        self._prefetch_bucket, self._max_live, self._max_reuse = prefetch, max_live, max_reuse
        names: list[list[Name]] = [
            [(number, position) for position in range(len(sizes))] for number, sizes in enumerate(modules)
        ]
        if count > 1 and len(modules[-1]) == 1 and modules[-1] == modules[0]:
            names[-1] = [(0, 0)]  # tied: the output layer has the embedding's parameter
        self._sizes = {
            (number, position): size for number, own in enumerate(modules) for position, size in enumerate(own)
        }
        self._partitioned = [[name for name in own if self._sizes[name] > threshold] for own in names]
        self._passed = list(accumulate((sum(modules[number]) for number in self.order), initial=0))
        self._queue = deque(
            (step, name) for step, module in enumerate(self.order) for name in self._partitioned[module]
        )
        self._uses: dict[Name, deque[int]] = {}
        for step, name in self._queue:
            self._uses.setdefault(name, deque()).append(step)
        self._gathered, self._prefetched_for = set[Name](), dict[Name, int]()
        # Parameters that are prefetched together, two or more, and those of them that are not used yet. The first use
        # copies all out of their buffer, which is freed when all have been used.
        self._buffers: list[tuple[frozenset[Name], set[Name]]] = []

    def fetch(self, step: int) -> None:
        """Gather the parameters of the module that runs."""
        for name in self._partitioned[self.order[step]]:
            self._uses[name].popleft()
            self._gathered.add(name)
            for _, unused in self._buffers:
                unused.discard(name)
        self._buffers = [buffer for buffer in self._buffers if buffer[1]]

    def prefetch(self, step: int) -> int:
        """Gather parameters of the next modules, up to the prefetch bucket; return the elements there are now."""
        while self._queue and self._queue[0][0] <= step:
            self._queue.popleft()
        live, together, size = sum(self._sizes[name] for name in self._gathered), set[Name](), 0
        while self._queue and size < min(self._max_live - live, self._prefetch_bucket):
            next_use, name = self._queue.popleft()
            self._prefetched_for[name] = next_use
            if name not in self._gathered:
                self._gathered.add(name)
                together.add(name)
                size += self._sizes[name]
        if len(together) > 1:  # a single one is gathered without a buffer
            self._buffers.append((frozenset(together), together))
        copied = sum(self._sizes[name] for whole, unused in self._buffers if unused < whole for name in whole)
        return live + size + copied

    def release(self, step: int) -> None:
        """Free the module's parameters, unless they are used again soon or prefetched for a later module."""
        for name in self._partitioned[self.order[step]]:
            next_uses = self._uses[name]
            near = bool(next_uses) and self._passed[next_uses[0]] - self._passed[step + 1] < self._max_reuse
            if not near and self._prefetched_for.get(name, -1) <= step:
                self._gathered.discard(name)
