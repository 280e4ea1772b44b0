"""Count the parameters that ZeRO-3 has gathered while each module runs.

It follows `PartitionedParameterCoordinator` of deepspeed/runtime/zero/partitioned_param_coordinator.py.

From its second step on DeepSpeed knows the order of modules. Before a module runs, its parameters and those of the next
modules, up to the prefetch bucket, are gathered; after it, they go unless they are wanted again within
`max_reuse_distance` elements. Parameters up to the persistence threshold are never partitioned and not counted here.
"""

from __future__ import annotations

from collections import deque
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
    count = len(modules)
    order = [*range(count), *reversed(range(count))]
    sizes = {(number, at): size for number, own in enumerate(modules) for at, size in enumerate(own)}
    names: list[list[Name]] = [[(number, at) for at in range(len(own))] for number, own in enumerate(modules)]
    if count > 1 and len(modules[-1]) == 1 and modules[-1] == modules[0]:
        names[-1] = [(0, 0)]  # tied: the output layer has the embedding's parameter
    partitioned = [[name for name in own if sizes[name] > threshold] for own in names]
    passed = list(accumulate((sum(modules[number]) for number in order), initial=0))
    queue = deque((step, name) for step, number in enumerate(order) for name in partitioned[number])
    uses: dict[Name, deque[int]] = {}
    for step, name in queue:
        uses.setdefault(name, deque()).append(step)
    gathered, prefetched_for = set[Name](), dict[Name, int]()
    # Parameters that are prefetched together, two or more, and those of them that are not used yet. The first use
    # copies all out of their buffer, which is freed when all have been used.
    buffers: list[tuple[frozenset[Name], set[Name]]] = []
    most: dict[tuple[str, int], float] = {}
    for step, module in enumerate(order):
        for name in partitioned[module]:
            uses[name].popleft()
            gathered.add(name)
            for _, unused in buffers:
                unused.discard(name)
        buffers = [buffer for buffer in buffers if buffer[1]]

        while queue and queue[0][0] <= step:
            queue.popleft()
        live, together, size = sum(sizes[name] for name in gathered), set[Name](), 0
        while queue and size < min(max_live - live, prefetch):
            next_use, name = queue.popleft()
            prefetched_for[name] = next_use
            if name not in gathered:
                gathered.add(name)
                together.add(name)
                size += sizes[name]
        if len(together) > 1:  # a single one is gathered without a buffer
            buffers.append((frozenset(together), together))

        if layers[module] != layers[-1] or module == count - 1:  # the loss; the final norm is small compared with it
            key = "forward" if step < count else "backward", layers[module]
            copied = sum(sizes[name] for whole, unused in buffers if unused < whole for name in whole)
            most[key] = max(most.get(key, 0.0), float(live + size + copied))

        for name in partitioned[module]:
            next_uses = uses[name]
            near = bool(next_uses) and passed[next_uses[0]] - passed[step + 1] < max_reuse
            if not near and prefetched_for.get(name, -1) <= step:
                gathered.discard(name)
    return most
