"""Record a real step's memory by storage, with the starts of forward, backward and update."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from zero_tp.engine.engine import TrainingEngine
from zero_tp.engine.zero.states import partition_of
from zero_tp.tools.planning.memory import CATEGORIES, Point
from zero_tp.tools.planning.tracking import Allocation, Allocations


class MarkedAllocations(Allocations):
    """`Allocations` with named moments.

    Attributes:
        marks: (name, clock) of each `note`, in order.
        gradient_since: `id` of an allocation that backward has stored in a `parameter.grad` →
            clock.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__(device_type)
        self.marks: list[tuple[str, int]] = []
        self.gradient_since: dict[int, int] = {}

    def note(self, name: str) -> None:
        """Name this moment."""
        self.marks.append((name, self.clock))

    def mark_gradient(self, gradient: Tensor) -> None:
        """Set the category of a gradient that backward has stored just now."""
        allocation = self._record(gradient, "outside")
        if allocation is not None and allocation.category is None:
            self.gradient_since[id(allocation)] = self.clock
            allocation.category = "gradients"

    def known(self) -> set[int]:
        """Return the addresses of the storages that are alive."""
        return set(self._alive)


@contextmanager
def followed(engine: TrainingEngine) -> Iterator[MarkedAllocations]:
    """Yield the storages that exist before or are allocated in the block, with the starts of the
    phases marked.

    Storages from before have a category: parameters, optimizer, gradients or buffers. Gradients
    that backward stores in `parameter.grad` have theirs, too.
    """
    allocations = MarkedAllocations(engine.device.type)

    def arrived(parameter: Tensor) -> None:
        grad = parameter.grad
        # Not part of a bucket.
        if grad is not None and grad.untyped_storage().nbytes() == grad.nbytes:
            allocations.mark_gradient(grad)

    handles = [
        engine.model.register_forward_pre_hook(lambda *_: allocations.note("forward")),
        engine.model.register_forward_hook(lambda *_: allocations.note("backward")),
        *(
            parameter.register_post_accumulate_grad_hook(arrived)
            for parameter in engine.model.parameters()
        ),
    ]
    step: Callable[..., Any] = engine.deepspeed_engine.step

    def stepping(*args: Any, **kwargs: Any) -> Any:
        if engine.deepspeed_engine.is_gradient_accumulation_boundary():
            allocations.note("step")
        return step(*args, **kwargs)

    engine.deepspeed_engine.step = stepping
    try:
        with allocations:
            _take_in(allocations, engine)
            yield allocations
    finally:
        engine.deepspeed_engine.step = step
        for handle in handles:
            handle.remove()


def _take_in(allocations: MarkedAllocations, engine: TrainingEngine) -> None:
    basic = engine.zero.states().optimizer
    states = [
        value
        for state in basic.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    masters = [fragment.flat for fragment in engine.zero.fragments()]
    partitions = getattr(engine.zero.optimizer, "grad_partitions_flat_buffer", None)  # ZeRO-3's
    rank = engine.topology.data_rank
    parameters = [partition_of(parameter, rank) for parameter in engine.model.parameters()]
    allocations.mark(parameters, "parameters")
    allocations.mark(states, "optimizer")
    allocations.mark(masters, "optimizer")
    allocations.mark(parameters, "parameters")  # in fp32 without ZeRO they are their own masters
    allocations.mark([] if partitions is None else [partitions], "gradients")
    allocations.mark(_other_tensors(allocations), "buffers")


def _other_tensors(allocations: MarkedAllocations) -> Iterable[Tensor]:
    known = allocations.known()
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()  # frozen objects are not listed
    things = gc.get_objects()
    if frozen:
        gc.collect()  # else garbage would be frozen
        gc.freeze()
    for thing in things:
        if (
            isinstance(thing, Tensor)
            and not thing.is_meta
            and thing.untyped_storage()._cdata not in known
        ):
            yield thing


def points(allocations: MarkedAllocations, begin: int) -> list[Point]:
    """Return the moments of the last micro-batch and of the optimizer's step, by category.

    Storages that outlive the forward that allocated them are activations; those that outlive their
    backward are gradients. Others of forward and backward are transients, others of the step
    buffers. What the loss has saved as the output weight's gradient is an activation until backward
    stores it as that.
    """
    marks = allocations.marks
    forward = max(clock for name, clock in marks if name == "forward")
    backward = max(clock for name, clock in marks if name == "backward")
    step = max((clock for name, clock in marks if name == "step"), default=allocations.clock)
    end = allocations.clock

    def category(one: Allocation, clock: int) -> str:
        if one.category is not None and clock >= allocations.gradient_since.get(id(one), 0):
            return one.category
        freed = one.freed if one.freed is not None else end + 1
        if one.allocated > step:
            return "optimizer" if freed > end else "buffers"
        for name, clock in reversed(marks):
            if one.allocated <= clock:
                continue
            following = min((c for _, c in marks if c > clock), default=step)
            if freed <= following:
                # DeepSpeed's buckets start as flat, empty tensors, which no operation of a layer
                # allocates.
                bucket = name == "backward" and "empty" in one.operation and len(one.shape) == 1
                return "buffers" if bucket else "transients"
            return "activations" if name == "forward" else "gradients"
        return "buffers"

    events = [
        (clock, category(one, clock), sign * one.bytes)
        for clock, one, sign in allocations.timeline()
    ]
    for one in allocations.all:
        since = allocations.gradient_since.get(id(one))
        if since is not None:
            events += [(since, category(one, one.allocated), -one.bytes)]
            events += [(since, category(one, since), one.bytes)]
    sizes = dict.fromkeys(CATEGORIES, 0.0)
    points: list[Point] = []
    for clock, kind, change in sorted(events, key=lambda event: event[0]):
        sizes[kind] += change
        if clock < max(begin, forward):
            continue
        if clock <= backward:
            phase = "forward"
            position = (clock - forward) / max(1, backward - forward)
        elif clock <= step:
            phase = "backward"
            position = 1 + (clock - backward) / max(1, step - backward)
        else:
            phase = "step"
            position = 2 + (clock - step) / max(1, end - step)
        points.append(Point(phase, position, dict(sizes), 0.0))
    return points
