"""Copy a value from the device to the host asynchronously."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """An asynchronous copy of a tensor to the host, or a CPU tensor itself."""

    def __init__(self, tensor: Tensor):
        self._values = tensor
        self._copy_done = None
        if tensor.device.type != "cpu":
            # Only a copy to page-locked memory is asynchronous; any other would wait for the device
            # here.
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            # An event, so that `wait` does not wait for what the stream is given later.
            self._copy_done = (
                torch.get_device_module(tensor.device).current_stream(tensor.device).record_event()
            )

    def wait(self) -> Tensor:
        """Wait for the copy and the device work before it; return the tensor in host memory."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        return self._values

    def read(self) -> Any:
        """Return the values as `Tensor.tolist` does."""
        return self.wait().tolist()
