"""M_D keeps checkpoints in one preallocated buffer, against fragmentation (arXiv 1910.02054, section 6.3)."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Size, Tensor


class _Slot:
    """A slot is a place in the buffer that is free again when this object is dropped."""

    def __init__(self, index: int, shape: Size):
        self.index, self.shape = index, shape


class ContiguousBuffer:
    """The buffer holds slots of equal size, made at the first `put` and used again by every step.

    Args:
        slots: tensors that wait at the same time (`number_checkpoints`).
        device: of the buffer; by default that of the tensors.
        pinned: page-locked host memory.
    """

    def __init__(self, slots: int, device: torch.device | None = None, *, pinned: bool = False):
        self.slots, self.device, self.pinned = slots, device, pinned
        self.buffer: Tensor | None = None
        self._free: list[int] = []

    def slot_for(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """Return a free slot and its view, shaped like the tensor.

        Raises:
            RuntimeError: more tensors wait than there are slots.
        """
        self._fit(tensor)
        assert self.buffer is not None
        if not self._free:
            raise RuntimeError(
                f"activation_checkpointing.number_checkpoints: all {self.slots} places are taken; raise it, or leave "
                "it out"
            )
        slot = _Slot(self._free.pop(), tensor.shape)
        weakref.finalize(slot, self._free.append, slot.index)
        return slot, self.view(slot)

    def view(self, slot: _Slot) -> Tensor:
        assert self.buffer is not None
        return self.buffer[slot.index, : slot.shape.numel()].view(slot.shape)

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


class Contiguous:
    """The store copies tensors into a ContiguousBuffer."""

    def __init__(self, buffer: ContiguousBuffer):
        self.buffer = buffer

    def put(self, tensor: Tensor) -> Any:
        slot, view = self.buffer.slot_for(tensor)
        view.copy_(tensor)
        return slot

    def take(self, token: Any) -> Tensor:
        """Return a view: the slot stays taken while it is used, so hold the token as long."""
        return self.buffer.view(token)
