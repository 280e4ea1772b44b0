"""Count the parameters that ZeRO-3 has gathered while each module runs.

It follows `PartitionedParameterCoordinator` of deepspeed/runtime/zero/partitioned_param_coordinator.py.

From its second step on DeepSpeed knows the order of modules. Before a module runs, its parameters and those of the next
modules, up to the prefetch bucket, are gathered; after it, they go unless they are wanted again within
`max_reuse_distance` elements. Parameters up to the persistence threshold are never partitioned and not counted here.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

Name = tuple[int, int]
"""(module, position in it) of a parameter."""


@lru_cache(maxsize=256)
def most_gathered(
    modules: tuple[tuple[int, ...], ...],
    layers: tuple[int, ...],
    threshold: int,
    prefetch_bucket: int,
    max_live: int,
    max_reuse: int,
) -> dict[tuple[str, int], float]:
    """Return the most elements gathered by ("forward" or "backward", the layer's number).

    Args:
        modules: elements of each parameter of each module, in forward's order. A parameter of more than one module
            (tied embeddings: of the first and the last) is counted with both.
        layers: of each module: the layer's number, -1 before the first and L after the last.
    """
    sizes = {(number, position): size for number, own in enumerate(modules) for position, size in enumerate(own)}
    partitioned: list[list[Name]] = [[] for _ in modules]
    for name, size in sizes.items():
        if size > threshold:
            partitioned[name[0]].append(name)
    if len(modules) > 1 and len(modules[-1]) == 1 and modules[-1] == modules[0]:
        partitioned[-1] = partitioned[0]  # tied: the output layer has the embedding's parameter
    order = [*range(len(modules)), *reversed(range(len(modules)))]
    passed = list(accumulate((sum(modules[number]) for number in order), initial=0))
    queue = [(step, name) for step, module in enumerate(order) for name in partitioned[module]][::-1]
    uses: dict[Name, list[int]] = {}
    for step, name in reversed(queue):
        uses.setdefault(name, []).append(step)
    gathered, prefetched_for, most = set[Name](), dict[Name, int](), dict[tuple[str, int], float]()
    # Parameters that are prefetched together, two or more, and those of them that are not used yet. The first use
    # copies all out of their buffer, which is freed when all have been used.
    buffers: list[tuple[list[Name], set[Name]]] = []
    for step, module in enumerate(order):
        gathered.update(partitioned[module])
        for _, unused in buffers:
            unused.difference_update(partitioned[module])
        buffers = [buffer for buffer in buffers if buffer[1]]

        while queue and queue[-1][0] <= step:
            queue.pop()
        live, together, size = sum(sizes[name] for name in gathered), list[Name](), 0
        while queue and size < min(max_live - live, prefetch_bucket):
            next_use, name = queue.pop()
            prefetched_for[name] = next_use
            if name not in gathered:
                gathered.add(name)
                together.append(name)
                size += sizes[name]
        if len(together) > 1:  # a single one is gathered without a buffer
            buffers.append((together, set(together)))
        copied = sum(sizes[name] for whole, unused in buffers if len(unused) < len(whole) for name in whole)
        # The output layer's peak is in the loss; the final norm before it is small.
        if layers[module] != layers[-1] or module == len(modules) - 1:
            key = "forward" if step < len(modules) else "backward", layers[module]
            most[key] = max(most.get(key, 0.0), float(live + size + copied))

        for name in partitioned[module]:
            near = any(use > step and passed[use] - passed[step + 1] < max_reuse for use in uses[name])
            if not near and prefetched_for.get(name, -1) <= step:
                gathered.discard(name)
    return most
