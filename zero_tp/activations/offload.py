"""P_a+cpu keeps checkpoints in host memory (arXiv 1910.02054, section 6.1).

On an accelerator the copies are asynchronous both ways, on streams of their own and through page-locked memory: out
while the next layer runs forward, back one layer ahead of backward. On the CPU a checkpoint is in host memory already
and stays where it is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from zero_tp.activations.contiguous import ContiguousBuffer


class _InHostMemory:
    """The token stands for a tensor on its way out, in host memory, or on its way back."""

    def __init__(self, host: Tensor, slot: Any, device: torch.device, before: _InHostMemory | None):
        self.host, self.slot, self.device = host, slot, device
        self.before = weakref.ref(before) if before is not None else lambda: None
        self.left: Any = None  # event: the copy out is done
        self.back: Tensor | None = None
        self.returned: Any = None  # event: the copy back is done


class Host:
    """The store keeps tensors of an accelerator in host memory.

    Args:
        buffer: preallocated host memory; without one each tensor gets page-locked memory from torch's pool.
    """

    def __init__(self, buffer: ContiguousBuffer | None = None):
        self.buffer = buffer
        self._streams: tuple[Any, Any] | None = None
        self._last: weakref.ref[_InHostMemory] | None = None

    def put(self, tensor: Tensor) -> _InHostMemory:
        device = tensor.device
        runtime = torch.get_device_module(device)
        out, _ = self._out_and_back(device)
        slot, host = self._host_memory_for(tensor)
        out.wait_stream(runtime.current_stream(device))
        with runtime.stream(out):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)
        token = _InHostMemory(host, slot, device, self._last() if self._last is not None else None)
        token.left = out.record_event()
        self._last = weakref.ref(token)
        return token

    def take(self, token: _InHostMemory) -> Tensor:
        self._fetch(token)
        before = token.before()
        if before is not None:
            self._fetch(before)  # what backward wants next
        current = torch.get_device_module(token.device).current_stream(token.device)
        current.wait_event(token.returned)
        tensor, token.back = token.back, None
        assert tensor is not None
        tensor.record_stream(current)
        return tensor

    def _fetch(self, token: _InHostMemory) -> None:
        if token.back is not None:
            return
        _, back = self._out_and_back(token.device)
        with torch.get_device_module(token.device).stream(back):
            back.wait_event(token.left)
            token.back = token.host.to(token.device, non_blocking=True)
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
