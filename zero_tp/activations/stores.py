"""Stores keep the inputs of recomputed modules until backward wants them: in place, split over the TP group (P_a), in
one preallocated buffer (M_D), or in host memory (P_a+cpu)."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size


class Store(Protocol):
    """A store gives a token for a tensor, and later the tensor for the token."""

    def put(self, tensor: Tensor) -> Any:
        """Keep a tensor, which the caller does not change afterwards. Return a token; dropping it frees the space."""

    def take(self, token: Any) -> Tensor:
        """Return the tensor of a token, bit for bit, on the device where it was."""


class InPlace:
    """This store keeps the tensor where it is."""

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self, token: Tensor) -> Tensor:
        return token


class Partitioned:
    """P_a keeps one t-th of each tensor in another store and gathers the whole just before use (arXiv 1910.02054,
    section 6.1).

    Right only for tensors that are equal on all TP ranks: the residual stream without sequence parallelism. Under SP
    each rank's checkpoint is its own, and this would mix them.
    """

    def __init__(self, group: Group, store: Store):
        self.group, self.store = group, store

    def put(self, tensor: Tensor) -> tuple[Any, Size]:
        """Keep this rank's piece of ⌈numel/t⌉ elements, padded where t does not divide. No communication."""
        size = group_size(self.group)
        length = -(-tensor.numel() // size)
        piece = tensor.flatten()[group_rank(self.group) * length :][:length]
        # A view would keep the whole tensor.
        piece = F.pad(piece, (0, length - piece.numel())) if piece.numel() < length else piece.clone()
        return self.store.put(piece), tensor.shape

    def take(self, token: tuple[Any, Size]) -> Tensor:
        """Gather the pieces over the TP group. [⌈numel/t⌉] → the tensor's shape."""
        piece, shape = token
        whole = all_gather(self.store.take(piece), self.group)
        return whole[: shape.numel()].view(shape)


class _Slot:
    """A slot is a row of the buffer that is free again when this object is dropped."""

    def __init__(self, index: int, shape: Size):
        self.index, self.shape = index, shape


class ContiguousBuffer:
    """M_D copies tensors into a buffer, against fragmentation (arXiv 1910.02054, section 6.3).

    It holds slots of equal size, made at the first `put` and used again by every step.

    Args:
        slots: tensors that wait at the same time (`number_checkpoints`).
        device: of the buffer; by default that of the tensors.
        pinned: page-locked host memory.
    """

    def __init__(self, slots: int, device: torch.device | None = None, *, pinned: bool = False):
        self.slots, self.device, self.pinned = slots, device, pinned
        self.buffer: Tensor | None = None
        self._free: list[int] = []

    def put(self, tensor: Tensor) -> Any:
        slot, view = self.slot_for(tensor)
        view.copy_(tensor)
        return slot

    def take(self, token: Any) -> Tensor:
        """Return a view: the slot stays taken while it is used, so hold the token as long."""
        assert self.buffer is not None
        return self.buffer[token.index, : token.shape.numel()].view(token.shape)

    def slot_for(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Return a free slot and its view, shaped like the tensor.

        Raises:
            RuntimeError: more tensors wait than there are slots.
        """
        self._fit(tensor)
        if not self._free:
            raise RuntimeError(
                f"activation_checkpointing.number_checkpoints: all {self.slots} slots are taken; raise it, or leave "
                "it out"
            )
        slot = _Slot(self._free.pop(), tensor.shape)
        weakref.finalize(slot, self._free.append, slot.index)
        return slot, self.take(slot)

    def _fit(self, tensor: Tensor) -> None:
        """Make the buffer, or another one while no slot is taken and the tensors have outgrown it."""
        buffer = self.buffer
        if buffer is not None and buffer.dtype == tensor.dtype and buffer.shape[1] >= tensor.numel():
            return
        if buffer is not None and len(self._free) < self.slots:
            raise RuntimeError(
                f"activation_checkpointing.contiguous_memory_optimization: a checkpoint of {tensor.numel()} elements "
                f"does not fit the slots of {buffer.shape[1]} made for the others of this step"
            )
        self.buffer = None
        self.buffer = torch.empty(
            self.slots,
            tensor.numel(),
            dtype=tensor.dtype,
            device=self.device or tensor.device,
            pin_memory=self.pinned,
        )
        self._free[:] = range(self.slots)[::-1]


LEAVING = 2
"""Tensors that are on their way to host memory at the same time, at most."""


class _InHostMemory:
    """The token stands for a tensor on its way out, in host memory, or on its way back."""

    def __init__(self, host: Tensor, slot: Any, device: torch.device, before: _InHostMemory | None):
        self.host, self.slot, self.device = host, slot, device
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.back: Tensor | None = None
        self.returned: Any = None  # event: the copy back is done

    def __del__(self) -> None:
        if self.back is not None:  # no backward has come for it: its memory is free once the copy is done
            torch.get_device_module(self.device).current_stream(self.device).wait_event(self.returned)


class Host:
    """P_a+cpu keeps tensors of an accelerator in host memory (arXiv 1910.02054, section 6.1).

    The copies are asynchronous both ways, on streams of their own and through page-locked memory: out while the next
    layer runs forward, back one layer ahead of backward. On the CPU a checkpoint is in host memory already, and stays
    where it is: this store is not used.

    The compute stream waits for the copy out of a tensor before its memory is freed, so that at most `LEAVING` are on
    the way, and copies back go to memory of the compute stream. `record_stream` would not do: the host is ahead of the
    device, and torch's allocator would find all those copies unfinished, and take new memory for each checkpoint.

    Args:
        buffer: preallocated host memory; without one each tensor gets page-locked memory from torch's pool.
    """

    def __init__(self, buffer: ContiguousBuffer | None = None):
        self.buffer = buffer
        self._streams: tuple[Any, Any] | None = None
        self._last: weakref.ref[_InHostMemory] | None = None
        self._leaving: deque[tuple[Tensor, Any]] = deque()  # each with the event of its copy's end

    def put(self, tensor: Tensor) -> _InHostMemory:
        device = tensor.device
        runtime = torch.get_device_module(device)
        out, _ = self._out_and_back(device)
        slot, host = self._host_memory_for(tensor)
        out.wait_stream(runtime.current_stream(device))
        with runtime.stream(out):
            host.copy_(tensor, non_blocking=True)
        token = _InHostMemory(host, slot, device, self._last() if self._last is not None else None)
        self._last = weakref.ref(token)
        self._leaving.append((tensor, out.record_event()))
        self._free_all_but_last(LEAVING, device)
        return token

    def take(self, token: _InHostMemory) -> Tensor:
        self._free_all_but_last(0, token.device)  # so that all copies out are done before one comes back
        self._fetch(token)
        before = token.before()
        if before is not None:
            self._fetch(before)  # what backward wants next
        torch.get_device_module(token.device).current_stream(token.device).wait_event(token.returned)
        tensor, token.back = token.back, None
        assert tensor is not None
        return tensor

    def _free_all_but_last(self, count: int, device: torch.device) -> None:
        """Free all but the last `count` tensors on their way out, once the compute stream waits for their copies."""
        while len(self._leaving) > count:
            torch.get_device_module(device).current_stream(device).wait_event(self._leaving[0][1])
            self._leaving.popleft()

    def _fetch(self, token: _InHostMemory) -> None:
        if token.back is not None:
            return
        _, back = self._out_and_back(token.device)
        runtime = torch.get_device_module(token.device)
        token.back = torch.empty(token.host.shape, dtype=token.host.dtype, device=token.device)
        back.wait_stream(runtime.current_stream(token.device))  # which may still use the memory for something else
        with runtime.stream(back):
            token.back.copy_(token.host, non_blocking=True)
        token.returned = back.record_event()

    def _host_memory_for(self, tensor: Tensor) -> tuple[Any, Tensor]:
        if self.buffer is not None:
            return self.buffer.slot_for(tensor)
        return None, torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def _out_and_back(self, device: torch.device) -> tuple[Any, Any]:
        if self._streams is None:
            runtime = torch.get_device_module(device)
            self._streams = (runtime.Stream(device), runtime.Stream(device))
        return self._streams
