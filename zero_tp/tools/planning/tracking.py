"""Track when each storage is allocated and freed, for real and fake tensors.

An allocation is recorded when its operation returns, a free when the last reference is gone.
Workspaces inside kernels and the allocator's fragmentation are not recorded.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zero_tp.data.batch import AnyBatch
from zero_tp.model.parallel_model import ParallelModel


@dataclass
class Allocation:
    """One storage.

    Attributes:
        bytes: its size.
        allocated, freed: positions in the order of all allocations and frees; `freed` is None while
            it is alive.
        operation, shape: the operation that allocated it, and the shape of its result.
        category: set by `Allocations.mark`, else None.
    """

    bytes: int
    allocated: int
    operation: str
    shape: tuple[int, ...]
    freed: int | None = None
    category: str | None = None


class Allocations(TorchDispatchMode):
    """`with Allocations() as allocations: …` records every storage that is allocated inside.

    Attributes:
        all: every storage in the order of allocation.
        clock: allocations and frees so far.
    """

    def __init__(self, device_type: str | None = None) -> None:
        """Record storages of one type of device.

        Args:
            device_type: None records all types but "meta".
        """
        super().__init__()
        self.all: list[Allocation] = []
        self.clock = 0
        self._device_type = device_type
        self._alive: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_iter(results):
            if isinstance(tensor, Tensor) and not self._existed_before(tensor, args, kwargs):
                self._record(tensor, str(function))
        return results

    def _existed_before(self, result: Tensor, args: Any, kwargs: Any) -> bool:
        """Return whether the result's storage is an argument's from before the block."""
        # A view and an in-place operation return the storage of an argument. One that was allocated
        # outside the block, such as a weight, must not count as new.
        address = result.untyped_storage()._cdata
        return address not in self._alive and any(
            isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata == address
            for tensor in tree_iter((args, kwargs))
        )

    def _record(self, tensor: Tensor, operation: str) -> Allocation | None:
        """Return the allocation of a tensor's storage, which is new unless it is alive."""
        kind = tensor.device.type
        if kind == "meta" or (self._device_type is not None and kind != self._device_type):
            return None
        storage = tensor.untyped_storage()
        # torch may give a new storage the address of a freed one. The callback below removes the
        # address at once, so a known address is a living storage.
        known = self._alive.get(storage._cdata)
        if known is not None:
            return known[0]
        self.clock += 1
        allocation = Allocation(storage.nbytes(), self.clock, operation, tuple(tensor.shape))
        self.all.append(allocation)
        address = storage._cdata

        def free(_: Any) -> None:
            self.clock += 1
            allocation.freed = self.clock
            self._alive.pop(address, None)

        self._alive[address] = (allocation, weakref.ref(storage, free))
        return allocation

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Set the category of storages. Storages from before the block count as allocated now."""
        for tensor in tensors:
            allocation = self._record(tensor, "outside")
            if allocation is not None:
                allocation.category = category

    def alive(self) -> list[Allocation]:
        return [allocation for allocation, _ in self._alive.values()]

    def timeline(self) -> list[tuple[int, Allocation, int]]:
        """Return (clock, allocation, +1 allocated or -1 freed) in order."""
        events = [(allocation.allocated, allocation, 1) for allocation in self.all]
        events += [
            (allocation.freed, allocation, -1)
            for allocation in self.all
            if allocation.freed is not None
        ]
        return sorted(events, key=lambda event: event[0])


# ---- one micro-batch -----------------------------------------------------------------------------


class MemorySample(NamedTuple):
    """The bytes at one moment of forward or backward, without model states.

    Attributes:
        phase: "forward" or "backward".
        layer: the layer's number, -1 before the first and L after the last.
        activations: bytes that backward needs.
        transients: all other bytes, except finished gradients of parameters.
        finished_elements: of those finished gradients.
    """

    phase: str
    layer: int
    activations: float
    transients: float
    finished_elements: float

    def offset_by(self, start: MemorySample, layer: int) -> MemorySample:
        """Return this sample plus `start`, the sample at which its part starts."""
        sizes = (start.activations + self.activations, start.transients + self.transients)
        return MemorySample(
            self.phase, layer, *sizes, start.finished_elements + self.finished_elements
        )


class DryRunPart(NamedTuple):
    """A part of forward or backward, such as one layer's.

    Its samples and its end are relative to its start.
    """

    samples: list[MemorySample]
    end: MemorySample


def measure(model: ParallelModel, batch: AnyBatch) -> list[DryRunPart]:
    """Run one micro-batch forward and backward, and free each gradient as soon as it is finished.

    The hooks of this function stay on the model, so discard it.

    Returns:
        The part before the layers, the forward of each layer, the loss with the final norm, the
        backward of each layer from the last on, and the part after them.
    """
    # Two layers; a number is the clock that a hook notes. Each line between two numbers is a part:
    #
    #     start  before  0  layer 0  1  layer 1  2  norm, head, loss, their backward
    #            2'  layer 1's backward  1'  layer 0's backward  0'  after  end
    #
    # Forward hooks note 0, 1 and 2. Gradients of the same inputs note 2', 1' and 0'.
    boundaries: list[int] = []
    finished: list[tuple[int, int]] = []  # gradients: (clock, elements)
    with Allocations(next(model.parameters()).device.type) as allocations:
        allocations.mark(model.parameters(), "parameters")
        allocations.mark(model.buffers(), "parameters")

        def drop_gradient(parameter: nn.Parameter) -> None:
            # How long a finished gradient lives depends on the ZeRO stage: zero.py counts it from
            # here on.
            parameter.grad = None
            finished.append((allocations.clock, parameter.numel()))

        def mark_layer(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            # Recomputation calls a layer's forward without hooks. The layer's backward ends with
            # its input's gradient.
            boundaries.append(allocations.clock)
            inputs[0].register_hook(lambda _: boundaries.append(allocations.clock))

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop_gradient)
        layers = [*model.transformer.layers, model.transformer.final_norm]
        for layer in layers:
            layer.register_forward_pre_hook(mark_layer)
        start = allocations.clock
        loss = model(batch.input_ids, **batch.arguments()).loss
        forward_end = allocations.clock
        loss.backward()
        # The loss keeps the output's storages alive, which belong to the micro-batch.
        del loss
        for allocation in allocations.alive():
            # Caches that a later micro-batch uses again would otherwise count as activations that
            # nothing frees.
            allocation.category = allocation.category or "outlives the micro-batch"
    assert len(boundaries) == 2 * len(layers), "each layer starts once"
    return _split(allocations, [start, *boundaries, allocations.clock], forward_end, finished)


def _split(
    allocations: Allocations,
    boundaries: Sequence[int],
    forward_end: int,
    finished: Sequence[tuple[int, int]],
) -> list[DryRunPart]:
    """Return the parts between the clocks `boundaries`.

    Activations are allocated in forward and freed in backward.
    """
    # A finished gradient sorts after the allocation (+1) or free (-1) with the same clock.
    events: list[tuple[int, int, Allocation | None, int]] = [
        (clock, 2, None, numel) for clock, numel in finished
    ]
    timeline = (event for event in allocations.timeline() if event[1].category is None)
    events += [
        (clock, sign, allocation, sign * allocation.bytes) for clock, allocation, sign in timeline
    ]
    sizes = [[0, 0, 0] for _ in boundaries[1:]]  # activations, transients, gradients
    samples: list[list[MemorySample]] = [[] for _ in boundaries[1:]]
    for clock, sign, allocation, change in sorted(events, key=lambda event: event[:2]):
        if clock <= boundaries[0]:
            continue
        part = min(len(sizes), bisect.bisect_left(boundaries, clock)) - 1
        if allocation is None:
            sizes[part][2] += change
            continue
        # Three storages over forward and backward:
        #
        #     forward           | backward
        #     +------------------------+         activation: backward frees it
        #        +------+      |                 transient
        #                      |   +------+      transient
        is_freed_in_forward = allocation.freed is not None and allocation.freed <= forward_end
        sizes[part][1 if allocation.allocated > forward_end or is_freed_in_forward else 0] += change
        if sign > 0:
            samples[part].append(
                MemorySample("forward" if clock <= forward_end else "backward", 0, *sizes[part])
            )
    return [
        DryRunPart(part, MemorySample("", 0, *size))
        for part, size in zip(samples, sizes, strict=True)
    ]


def join_parts(parts: Sequence[DryRunPart], representatives: Sequence[int]) -> list[MemorySample]:
    """Return the samples of the whole model.

    Args:
        parts: from `measure`, of a model of representative layers.
        representatives: for each layer the number of its representative.
    """
    before, *inner, after = parts
    # n layers give n parts of forward, one of the loss and n of backward, from the last layer on.
    # The slice from the end to the middle has backward in the layers' order.
    middle = len(inner) // 2
    forward = inner[:middle]
    loss = inner[middle]
    backward = inner[:middle:-1]
    numbered = list(enumerate(representatives))
    ordered = [
        (-1, before),
        *((layer, forward[number]) for layer, number in numbered),
        (len(numbered), loss),
    ]
    ordered += [(layer, backward[number]) for layer, number in reversed(numbered)]
    samples = list[MemorySample]()
    start = MemorySample("", -1, 0.0, 0.0, 0.0)
    # A part's samples count from the part's start, so one executed layer serves many places: each
    # time the bytes that are alive at its start are added.
    for layer, part in [*ordered, (-1, after)]:
        samples += [sample.offset_by(start, layer) for sample in part.samples]
        start = part.end.offset_by(start, layer)
    return samples
