"""Find where a number that is not finite comes from."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from zero_tp.parallel.agreement import all_gather_object


class NonfiniteTrace:
    """A trace finds the first output of a layer, or gradient, that is not finite on any rank. It looks at all of them.

    It changes no number. Looking waits for the device at every layer.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.begin()
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._looking(name))
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._gradient(f"the gradient of {name}"))

    def begin(self) -> None:
        """Begin a step."""
        self.looked, self.found = 0, ""

    def _look(self, tensor: Tensor, what: str) -> None:
        self.looked += 1
        if not self.found and tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            kind = "nan" if bool(tensor.detach().isnan().any()) else "inf"
            self.found = f"{self.looked} {what} ({kind})"

    def _looking(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in _tensors(output):
                self._look(tensor, f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient(f"the gradient of the output of {name}"))

        return look

    def _gradient(self, what: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self._look(gradient, what)

        return look

    def told(self) -> str:
        """Return the first finding of the step over all ranks, in words. Collective over all ranks."""
        found = all_gather_object((self.found, socket.gethostname()))
        there = [(*text.partition(" ")[::2], rank, host) for rank, (text, host) in enumerate(found) if text]
        if not there:
            return "every output and every local gradient is finite: a sum over ranks is not"
        _, what, rank, host = min(there, key=lambda each: int(each[0]))
        return f"the first that is not finite is {what} on rank {rank} ({host})"


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)
