"""Stores keep the inputs of recomputed modules from forward until backward.

In place, split over the TP group (P_a), in one preallocated buffer (M_D), or in host memory
(P_a+cpu): the names of arXiv 1910.02054.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from zero_tp.base.errors import UserError
from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size

MAX_COPIES_OUT = 2
"""Maximum number of tensors that are being copied to host memory at a time."""


class Store(Protocol):
    """Keeps tensors: `put` returns a handle, and `take` returns the tensor of a handle."""

    def put(self, tensor: Tensor) -> Any:
        """Store a tensor, which the caller no longer changes. Return a handle; dropping it frees
        the space.
        """

    def take(self, handle: Any) -> Tensor:
        """Return the tensor of a handle, bit for bit, on its device."""


class InPlaceStore:
    """Keep the tensor itself."""

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self, handle: Tensor) -> Tensor:
        return handle


class PartitionedStore:
    """P_a: keep one t-th of each tensor in another store, and gather the whole before use (arXiv
    1910.02054, 6.1).

    Correct only for tensors that are equal on all TP ranks: the residual stream without sequence
    parallelism.
    """

    def __init__(self, group: Group, store: Store):
        self.group = group
        self.store = store

    def put(self, tensor: Tensor) -> tuple[Any, Size]:
        """Store this rank's piece of ⌈numel/t⌉ elements, padded if t does not divide. No
        communication.
        """
        # 5 elements on TP 2: rank 0 keeps [0 1 2], rank 1 [3 4 ·]. `take` gathers [0 1 2 3 4 ·] and
        # cuts the padding off.
        length = -(-tensor.numel() // group_size(self.group))
        piece = tensor.flatten()[group_rank(self.group) * length :][:length]
        # A view would keep the whole tensor alive.
        piece = (
            F.pad(piece, (0, length - piece.numel())) if piece.numel() < length else piece.clone()
        )
        return self.store.put(piece), tensor.shape

    def take(self, handle: tuple[Any, Size]) -> Tensor:
        """Gather the pieces over the TP group. [⌈numel/t⌉] → the tensor's shape."""
        piece, shape = handle
        # Every TP rank recomputes the same layers in the same order, so the gathers meet.
        whole = all_gather(self.store.take(piece), self.group)
        return whole[: shape.numel()].view(shape)


class _Slot:
    """A row of the buffer, free again when this object is dropped."""

    def __init__(self, index: int, shape: Size):
        self.index = index
        self.shape = shape


class ContiguousBuffer:
    """M_D: copy tensors into slots of one buffer, against fragmentation (arXiv 1910.02054, section
    6.3).

    The buffer is made at the first `put` and reused by every step.

    Args:
        slots: maximum number of tensors kept at a time (`number_checkpoints`).
        device: of the buffer; by default that of the tensors.
        pinned: use page-locked host memory.
    """

    def __init__(self, slots: int, device: torch.device | None = None, *, pinned: bool = False):
        self.slots = slots
        self.device = device
        self.pinned = pinned
        self.buffer: Tensor | None = None
        self._free: list[int] = []

    def put(self, tensor: Tensor) -> Any:
        slot, view = self.slot_for(tensor)
        view.copy_(tensor)
        return slot

    def take(self, handle: Any) -> Tensor:
        """Return a view of the slot; hold the handle as long as the view is used."""
        assert self.buffer is not None
        return self.buffer[handle.index, : handle.shape.numel()].view(handle.shape)

    def slot_for(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Return a free slot and its view, shaped like the tensor."""
        self._ensure_buffer(tensor)
        if not self._free:
            raise UserError(
                f"activation_checkpointing.number_checkpoints: all {self.slots} slots are taken, "
                "as by two forwards "
                "before a backward; use a larger number, or leave contiguous_memory_optimization "
                "out"
            )
        slot = _Slot(self._free.pop(), tensor.shape)
        # A slot is free once its handle is dropped: at the end of the layer's backward, or with a
        # graph that had none.
        weakref.finalize(slot, self._free.append, slot.index)
        return slot, self.take(slot)

    def _ensure_buffer(self, tensor: Tensor) -> None:
        """Make the buffer, or a larger one if no slot is taken."""
        buffer = self.buffer
        if (
            buffer is not None
            and buffer.dtype == tensor.dtype
            and buffer.shape[1] >= tensor.numel()
        ):
            return
        if buffer is not None and len(self._free) < self.slots:
            raise UserError(
                "activation_checkpointing.contiguous_memory_optimization: a checkpoint of "
                f"{tensor.numel()} "
                f"{tensor.dtype} elements does not fit the slots of {buffer.shape[1]} "
                f"{buffer.dtype} elements in use; "
                "leave it out"
            )
        self.buffer = buffer = None  # freed before the larger one is made
        shape = (self.slots, tensor.numel())
        device = self.device or tensor.device
        self.buffer = torch.empty(shape, dtype=tensor.dtype, device=device, pin_memory=self.pinned)
        # In place, because finalizers of slots append to this list.
        self._free[:] = range(self.slots)[::-1]


class _HostTensor:
    """The handle of a tensor in host memory, or on its way there or back."""

    def __init__(self, host: Tensor, slot: Any, device: torch.device, previous: _HostTensor | None):
        self.host = host
        self.slot = slot
        self.device = device
        # Weak, because a chain of strong references would keep the tensors of all earlier layers.
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        self.device_copy: Tensor | None = None
        self.copy_back_done: Any = None  # an event

    def __del__(self) -> None:
        # Never taken: the copy must end before its memory is reused.
        if self.device_copy is not None:
            torch.get_device_module(self.device).current_stream(self.device).wait_event(
                self.copy_back_done
            )


class HostStore:
    """P_a+cpu: keep tensors of an accelerator in host memory (arXiv 1910.02054, section 6.1).

    Copies run on streams of their own and through page-locked memory: out during the next layer's
    forward, back one layer ahead of backward.

    The compute stream waits for a tensor's copy out before the tensor is freed, so at most
    `MAX_COPIES_OUT` copies are under way. With `record_stream`, torch's allocator would take new
    memory for each checkpoint whose copy has not ended, because the host runs ahead of the device.

        compute    layer 1 | layer 2 | wait for x0's copy, free x0; layer 3 | …
        out          x0 →  |   x1 →  |   x2 →                                     forward
        compute    take x2: wait for it; layer 3 again | take x1: layer 2 again | …
        back         ← x2, ← x1                        |   ← x0                   backward

    Args:
        buffer: preallocated host memory; by default each tensor gets page-locked memory from
            torch's pool.
    """

    def __init__(self, buffer: ContiguousBuffer | None = None):
        self.buffer = buffer
        self._streams: tuple[Any, Any] | None = None  # out, back
        self._last: weakref.ref[_HostTensor] | None = None
        self._copies_out: deque[tuple[Tensor, Any]] = deque()  # tensor, event of its copy's end

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        return HostStore(copy.deepcopy(self.buffer, memo))  # streams cannot be copied

    def put(self, tensor: Tensor) -> _HostTensor:
        device = tensor.device
        runtime = torch.get_device_module(device)
        out, _ = self._copy_streams(device)
        if self.buffer is not None:
            slot, host = self.buffer.slot_for(tensor)
        else:
            slot = None
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # The compute stream may not have written the tensor yet.
        out.wait_stream(runtime.current_stream(device))
        with runtime.stream(out):
            host.copy_(tensor, non_blocking=True)
        handle = _HostTensor(host, slot, device, self._last() if self._last is not None else None)
        self._last = weakref.ref(handle)
        self._copies_out.append((tensor, out.record_event()))
        self._free_all_but_last(MAX_COPIES_OUT, device)
        return handle

    def take(self, handle: _HostTensor) -> Tensor:
        self._free_all_but_last(0, handle.device)  # all copies out are done before one comes back
        self._fetch(handle)
        # Backward takes the tensors in reverse order, so the one before comes next.
        previous = handle.previous()
        if previous is not None:
            self._fetch(previous)  # backward needs it next
        torch.get_device_module(handle.device).current_stream(handle.device).wait_event(
            handle.copy_back_done
        )
        tensor = handle.device_copy
        handle.device_copy = None
        assert tensor is not None
        return tensor

    def _free_all_but_last(self, count: int, device: torch.device) -> None:
        """Free all but the last `count` tensors being copied out; the compute stream waits for
        their copies first.
        """
        while len(self._copies_out) > count:
            torch.get_device_module(device).current_stream(device).wait_event(
                self._copies_out[0][1]
            )
            self._copies_out.popleft()

    def _fetch(self, handle: _HostTensor) -> None:
        if handle.device_copy is not None:
            return
        _, back = self._copy_streams(handle.device)
        runtime = torch.get_device_module(handle.device)
        handle.device_copy = torch.empty(
            handle.host.shape, dtype=handle.host.dtype, device=handle.device
        )
        back.wait_stream(runtime.current_stream(handle.device))  # which may still use this memory
        with runtime.stream(back):
            handle.device_copy.copy_(handle.host, non_blocking=True)
        handle.copy_back_done = back.record_event()

    def _copy_streams(self, device: torch.device) -> tuple[Any, Any]:
        if self._streams is None:
            runtime = torch.get_device_module(device)
            self._streams = (runtime.Stream(device), runtime.Stream(device))
        return self._streams
