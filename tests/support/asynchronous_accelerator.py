"""A CPU accelerator that claims to be asynchronous, for tests of the real DeepSpeed engine.

Inside `asynchronous()` DeepSpeed takes the code paths of a GPU: streams, events and
synchronisations. Each operation still runs at once, so the results are those of the plain CPU
accelerator. A checker (stream_checker.py) finds what a GPU may run in another order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch._C._distributed_c10d import Work

from tests.support.stream_checker import RecordingEvent, RecordingStream, StreamChecker


class AsynchronousAccelerator(CPU_Accelerator):
    """The CPU, presented to DeepSpeed as `devices` asynchronous devices; other ordinals are
    refused.

    Attributes:
        checker: of streams, events and the host.
    """

    def __init__(self, devices: int) -> None:
        super().__init__()
        self.checker, self._devices = StreamChecker(), devices

    def is_synchronized_device(self) -> bool:  # which decides the other two
        return False

    # ---- devices ---------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self._devices

    def set_device(self, device_index: Any) -> None:
        self._check(device_index.index if isinstance(device_index, torch.device) else device_index)

    def device_name(self, device_index: Any = None) -> str:
        self._check(device_index)
        return "cpu"

    def device(self, device_index: Any = None) -> Any:
        self._check(device_index)

    def _check(self, index: Any) -> None:
        if index is not None and int(index) >= self._devices:
            raise RuntimeError(f"invalid device ordinal {index}: there are {self._devices}")

    # ---- streams ---------------------------------------------------------------------------------

    @property
    def Stream(self) -> Callable[..., RecordingStream]:
        return partial(RecordingStream, self.checker)

    @property
    def Event(self) -> Callable[..., RecordingEvent]:
        return partial(RecordingEvent, self.checker)

    def stream(self, stream: RecordingStream) -> Any:
        return self.checker.use(stream)

    def current_stream(self, device_index: Any = None) -> RecordingStream:
        return self.checker.current

    def default_stream(self, device_index: Any = None) -> RecordingStream:
        return self.checker.default

    def synchronize(self, device_index: Any = None) -> None:
        self.checker.device_synchronizes()


@contextmanager
def asynchronous(devices: int | None = None) -> Iterator[AsynchronousAccelerator]:
    """Make it DeepSpeed's accelerator inside the block.

    Args:
        devices: visible to this rank; by default one for each rank of this machine.
    """
    before = get_accelerator()
    accelerator = AsynchronousAccelerator(devices or int(os.environ["LOCAL_WORLD_SIZE"]))
    checker, wait = accelerator.checker, Work.wait

    def waited(work: Work, *arguments: Any) -> Any:
        checker.waited(work)
        return wait(work, *arguments)

    def record_stream(tensor: Tensor, stream: RecordingStream) -> None:
        checker.memory(tensor, checker.default).recorded.add(stream)

    set_accelerator(accelerator)
    try:
        with (
            mock.patch.object(Work, "wait", waited),
            mock.patch.object(Tensor, "record_stream", record_stream),
            checker,
        ):
            yield accelerator
    finally:
        set_accelerator(before)
