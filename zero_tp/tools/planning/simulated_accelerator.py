"""A simulated accelerator, on which the model's code takes the branches that it takes on a real
one.

Its tensors are fake (torch's FakeTensorMode), on a PrivateUse1 device without a C++ backend. Fused
attention, page-locked memory, streams with their events, and random generators are replaced.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from zero_tp.base.errors import UserError
from zero_tp.model import flex_attention
from zero_tp.parallel import devices

T = TypeVar("T")

TIMEOUT_SECONDS = 300.0


def _hide_devices() -> None:
    os.environ.update(devices.WITHOUT_DEVICES)


def has_real_device() -> bool:
    """Return whether this process sees an accelerator, apart from the simulated one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # Once registered, the simulated device is the current accelerator of this process.
    return accelerator is not None and accelerator.type != "sim"


def run_isolated(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """Call a module's `function` in a new Python process without devices, and return its result.

    The simulated device becomes its process's accelerator (`at::getAccelerator` prefers
    PrivateUse1): from then on a backward on CUDA fails.

    Raises:
        UserError: the process has no result within `TIMEOUT_SECONDS`, for example because it was
            killed.
    """
    # spawn, because a forked process has inherited CUDA, which cannot be initialised again there.
    # The variables are set before torch looks for a device.
    with _without_script(), multiprocessing.get_context("spawn").Pool(1, _hide_devices) as pool:
        try:
            return pool.apply_async(function, arguments, options).get(TIMEOUT_SECONDS)
        except multiprocessing.TimeoutError:
            raise UserError(
                f"the plan's dry run had no result in {TIMEOUT_SECONDS:g} s; its process may have "
                "been killed for "
                "want of memory: run zero-tp plan where more is free"
            ) from None


@contextmanager
def _without_script() -> Iterator[None]:
    """Hide this process's script, such as a training, which a new process would run first."""
    # multiprocessing's spawn finds the script by these names and imports it, as `__mp_main__`,
    # before it calls anything.
    main = vars(sys.modules["__main__"])
    names: tuple[str, ...] = ("__spec__", "__file__")
    script = {name: main.pop(name) for name in names if name in main}
    main["__spec__"] = None
    try:
        yield
    finally:
        main.update(script)


@contextmanager
def simulated_accelerator(*, varlen: bool = True) -> Iterator[torch.device]:
    """Yield the simulated device. It is the same on machines with and without an accelerator.

    Args:
        varlen: `varlen_attn` and `flex_attention` run on it.
    """
    with ExitStack() as stack:
        # The plan counts page-locked tensors by itself; locking pages needs a real device.
        stack.enter_context(_PageableMemory())
        for owner, name, replacement in (
            (devices, "runs_flash", lambda _: varlen),
            (F, "scaled_dot_product_attention", _fused_attention),
            # Its tables of blocks are small.
            (flex_attention, "build_block_mask", lambda *_: None),
            (flex_attention, "capped_attention", _fused_attention),
            (flex_attention, "attention_with_log_sums", _fused_with_log_sums),
            (Tensor, "record_stream", lambda *_: None),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield _simulated()


@functools.cache
def _simulated() -> torch.device:
    """Register the simulated device with torch, once in a process."""
    _setup_privateuseone_for_python_backend("sim")
    runtime: Any = torch.get_device_module("sim")
    runtime.Stream = runtime.current_stream = _Stream
    runtime.stream = nullcontext
    runtime.get_rng_state = runtime.set_rng_state = lambda *_: None  # for `torch.random.fork_rng`
    # torch's checkpoint(), later in this process, opens an autocast of the backend that was
    # registered last.
    runtime.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return torch.device("sim")


class _Stream:
    """A stream, and an event on it. All work is done at once, so nothing waits."""

    def __init__(self, *_: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def wait_stream(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        """Return at once. torch's distributed checkpoints, later in this process, call it."""

    wait_event = wait_stream


class _PageableMemory(TorchFunctionMode):
    """Allocate pageable memory instead of page-locked memory."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return function(*args, **kwargs)


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any, **options: Any
) -> Any:
    """Return a fake output, and keep for backward what torch's flash attention keeps.

    `scaled_dot_product_attention` itself would choose the maths kernel on the simulated device, and
    `flex_attention` has no kernel there.
    Fused kernels keep Q, K, V, the mask, their output and the logarithm of each softmax's sum, and
    a seed instead of dropout's mask.
    """
    return _Fused.apply(query, key, value, mask)


def _fused_with_log_sums(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return `_fused_attention`, and the sums' logarithms, of which it keeps its own."""
    output = _fused_attention(query, key, value, mask)
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        if value.shape[-1] != query.shape[-1]:
            batch, heads, length, _ = query.shape
            sizes = (length, batch, heads, value.shape[-1])
            output = query.new_empty(sizes).permute(1, 2, 0, 3)
        # The last one is the logarithm of each softmax's sum, fp32 [b, a, s].
        ctx.save_for_backward(
            query, key, value, mask, output, query.new_empty(query.shape[:3], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (*(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3]), None)
