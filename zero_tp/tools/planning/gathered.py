"""Count the parameters that ZeRO-3 has gathered while each module runs.

This simulates `PartitionedParameterCoordinator`
(deepspeed/runtime/zero/partitioned_param_coordinator.py). From its second step on DeepSpeed knows
the order of modules. Before a module runs, it gathers the module's parameters and prefetches those
of the next modules, up to the prefetch bucket. After the module it frees parameters, unless they
are used again within `max_reuse_distance` elements. Recomputation runs a layer's modules once more
before their backward, so the whole layer may be gathered at once. Parameters up to the persistence
threshold are never partitioned and are not counted here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate, groupby

ParameterId = tuple[int, int]
"""A parameter: (number of its module, position in the module)."""


@lru_cache(maxsize=256)
def most_gathered(
    modules: tuple[tuple[int, ...], ...],
    layers: tuple[int, ...],
    tied: bool,
    recomputed: Collection[int],
    threshold: int,
    prefetch_bucket: int,
    max_live: int,
    max_reuse: int,
) -> dict[tuple[str, int], float]:
    """Return the most gathered elements, by ("forward" or "backward", the layer's number).

    For each module, in DeepSpeed's order: gather its own parameters, prefetch, compute, release.
    So the most is counted after the prefetch. The prefetch compares its bounds before it adds a
    parameter, so the last one may exceed the bucket.

    Drawn with parameters a, b, c of 10 elements each, which one prefetch gathers:

        prefetched            buffer 30                        30 elements
        a's module runs       buffer 30, copies of a b c       60
        b's module runs       buffer 30, copies of a b c       60, 50 if a is released
        c's module runs       copies of a b c                  30, 10 if a and b are

    `AllGatherCoalescedHandle.wait` copies all of them at the first use. Each parameter refers to
    the handle, and so to the buffer, until its own module waits.

    Args:
        modules, layers, tied: see `RankParameters`.
        recomputed: numbers of the layers whose modules run again in backward; hashable.
        threshold, prefetch_bucket, max_live, max_reuse: DeepSpeed's limits, in elements.
    """
    sizes = _sizes(modules)
    partitioned = _partitioned(modules, threshold, tied)
    order = _execution_order(layers, recomputed)
    # All parameters of a module count here, persistent ones too: `__params_to_release` walks over
    # whole modules until it has passed `max_reuse` elements.
    numel_before = list(accumulate((sum(modules[number]) for number in order), initial=0))
    queue = [
        (step, parameter) for step, module in enumerate(order) for parameter in partitioned[module]
    ][::-1]
    uses = _steps_of_uses(queue)
    gathered = set[ParameterId]()
    prefetched_for = dict[ParameterId, int]()
    most = dict[tuple[str, int], float]()
    # Each prefetch of several parameters has a buffer: (its parameters, those not used yet).
    buffers: list[tuple[list[ParameterId], set[ParameterId]]] = []
    for step, module in enumerate(order):
        gathered.update(partitioned[module])
        for _, unused in buffers:
            unused.difference_update(partitioned[module])
        buffers = [buffer for buffer in buffers if buffer[1]]

        while queue and queue[-1][0] <= step:
            queue.pop()
        live = sum(map(sizes.__getitem__, gathered))
        prefetched = list[ParameterId]()
        size = 0
        while queue and size < min(max_live - live, prefetch_bucket):
            next_use, parameter = queue.pop()
            # A prefetch skips a parameter that is still gathered, and remembers for which use. It
            # stays gathered until then, since nothing would fetch it again in time.
            prefetched_for[parameter] = next_use
            if parameter not in gathered:
                gathered.add(parameter)
                prefetched.append(parameter)
                size += sizes[parameter]
        if len(prefetched) > 1:  # a single parameter is gathered without a buffer
            buffers.append((prefetched, set(prefetched)))
        in_use = [contents for contents, unused in buffers if len(unused) < len(contents)]
        copied = sum(sizes[parameter] for contents in in_use for parameter in contents)
        # Of the modules after the layers only the last one counts, the output layer: the final norm
        # is small.
        if layers[module] != layers[-1] or module == len(modules) - 1:
            key = ("forward" if step < len(modules) else "backward", layers[module])
            most[key] = max(most.get(key, 0.0), float(live + size + copied))

        for parameter in partitioned[module]:
            # The distance of a use: the elements of the modules in between.
            distances = (
                numel_before[use] - numel_before[step + 1] for use in uses[parameter] if use > step
            )
            is_reused = any(distance < max_reuse for distance in distances)
            if not is_reused and prefetched_for.get(parameter, -1) <= step:
                gathered.discard(parameter)
    return most


def _sizes(modules: tuple[tuple[int, ...], ...]) -> dict[ParameterId, int]:
    """Return the elements of each parameter."""
    return {
        (number, position): size
        for number, numels in enumerate(modules)
        for position, size in enumerate(numels)
    }


def _steps_of_uses(queue: list[tuple[int, ParameterId]]) -> dict[ParameterId, list[int]]:
    """Return the steps that use each parameter, in order; the queue's last entry is used first."""
    uses: dict[ParameterId, list[int]] = {}
    for step, parameter in reversed(queue):
        uses.setdefault(parameter, []).append(step)
    return uses


def _execution_order(layers: Sequence[int], recomputed: Collection[int]) -> list[int]:
    """Return the numbers of the modules in the order in which they run.

    Forward comes first, then backward with its recomputation.
    """
    order = list(range(len(layers)))
    for layer, group in groupby(reversed(range(len(layers))), key=lambda number: layers[number]):
        # Modules 0 (embedding), 1 and 2 (a layer), 3 (head); the layer is recomputed as a whole:
        #
        #     forward 0 1 2 3    backward 3    recompute 1 2    backward 2 1    backward 0
        backward = list(group)
        order += [*reversed(backward), *backward] if layer in recomputed else backward
    return order


def _partitioned(
    modules: tuple[tuple[int, ...], ...], threshold: int, tied: bool
) -> list[list[ParameterId]]:
    """Return each module's parameters above the persistence threshold.

    A tied last module has the first module's.
    """
    partitioned = [
        [(number, position) for position, size in enumerate(numels) if size > threshold]
        for number, numels in enumerate(modules)
    ]
    if tied:
        partitioned[-1] = [(0, position) for _, position in partitioned[-1]]
    return partitioned
