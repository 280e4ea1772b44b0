"""Measure what exists at every moment of one micro-batch of a model, in parts that begin and end with its layers."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from zero_tp.data.batch import AnyBatch
from zero_tp.models.model import ParallelModel
from zero_tp.planning.tracking import Allocation, Allocations


class Moment(NamedTuple):
    """Bytes at one point of a forward or backward, without parameters, finished gradients and model states.

    Attributes:
        phase: "forward" or "backward". layer: the layer's number, -1 before the first and L after the last.
        activations: bytes that backward will want. transients: all others.
        gradients: elements of parameters whose gradients are done.
    """

    phase: str
    layer: int
    activations: float
    transients: float
    gradients: float


class Part(NamedTuple):
    """A stretch of a pass: its moments, and the changes over all of it, relative to its start."""

    moments: list[Moment]
    activations: int
    transients: int
    gradients: int


def measure(model: ParallelModel, batch: AnyBatch) -> list[Part]:
    """Run one micro-batch forward and backward; each gradient goes as soon as it is done.

    Args:
        model: is good for nothing else afterwards.

    Returns:
        What is before the layers, the forward of each, the loss, the backward of each from the last on, what is after.
    """
    ends: list[int] = []
    done: list[tuple[int, int, int]] = []
    with Allocations(next(model.parameters()).device.type) as allocations:
        allocations.mark(model.parameters(), "parameters")
        allocations.mark(model.buffers(), "parameters")

        def let_go(parameter: nn.Parameter) -> None:
            parameter.grad = None
            done.append((allocations.clock, 2, parameter.numel()))

        def begins(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            # Recomputation calls a layer's forward and not its hooks. Its backward ends with its input's gradient.
            ends.append(allocations.clock)
            inputs[0].register_hook(lambda _: ends.append(allocations.clock))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(let_go)
        layers = [*model.transformer.layers, model.transformer.final_norm]
        for layer in layers:
            layer.register_forward_pre_hook(begins)
        begin = allocations.clock
        loss = model(batch.input_ids, **batch.arguments()).loss
        turned = allocations.clock
        loss.backward()
        del loss
        for one in allocations.alive():
            one.category = one.category or "outlives the micro-batch"
    assert len(ends) == 2 * len(layers), "each begins once"
    return _cut(allocations, [begin, *ends, allocations.clock], turned, done)


def _cut(
    allocations: Allocations, ends: Sequence[int], turned: int, done: Sequence[tuple[int, int, int]]
) -> list[Part]:
    """Return the parts between the clocks `ends`. What is made before `turned` and gone after it is an activation."""

    def is_kept(one: Allocation) -> bool:
        return one.made <= turned and (one.gone is None or one.gone > turned)

    sizes = [[0, 0, 0] for _ in ends[1:]]  # transients, activations, gradients
    moments: list[list[Moment]] = [[] for _ in ends[1:]]
    events: list[tuple[int, int, Allocation | int]] = [
        (clock, sign, one) for clock, one, sign in allocations.timeline() if one.category is None and clock > ends[0]
    ]
    for clock, sign, one in sorted([*events, *done], key=lambda event: event[:2]):
        number = min(len(sizes), bisect.bisect_left(ends, clock)) - 1
        size = sizes[number]
        if isinstance(one, int):
            size[2] += one
            continue
        size[is_kept(one)] += sign * one.bytes
        if sign > 0:
            phase = "forward" if clock <= turned else "backward"
            moments[number].append(Moment(phase, 0, size[1], size[0], size[2]))
    return [Part(found, size[1], size[0], size[2]) for found, size in zip(moments, sizes, strict=True)]


def joined(parts: Sequence[Part], order: Sequence[int]) -> list[Moment]:
    """Return the moments of a model whose layers are like those that have these numbers.

    Args:
        parts: what `measure` returns.
    """
    last = len(order)
    stretches = [(-1, parts[0]), *((layer, parts[1 + number]) for layer, number in enumerate(order))]
    stretches += [(last, parts[len(parts) // 2])]
    stretches += [(layer, parts[-2 - order[layer]]) for layer in reversed(range(last))]
    found: list[Moment] = []
    activations = transients = gradients = 0.0
    for layer, part in [*stretches, (-1, parts[-1])]:
        for one in part.moments:
            found.append(
                Moment(
                    one.phase,
                    layer,
                    activations + one.activations,
                    transients + one.transients,
                    gradients + one.gradients,
                )
            )
        activations += part.activations
        transients += part.transients
        gradients += part.gradients
    return found
