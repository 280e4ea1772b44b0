"""Find the layer and rank where a non-finite number comes from."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_tp.parallel.agreement import all_gather_object


class NonfiniteTrace:
    """Find a step's first layer output or gradient that is not finite on any rank.

    It changes no number. It synchronises with the device at every layer.
    """

    def __init__(self, model: nn.Module):
        self.begin()
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(self._output_hook(name))
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._gradient_hook(f"the gradient of {name}"))

    def begin(self) -> None:
        """Begin a step."""
        self._checked = 0
        self._first: tuple[int, str] | None = None

    def _check(self, tensor: Tensor, name: str) -> None:
        self._checked += 1
        if self._first is None and tensor.is_floating_point() and not bool(tensor.detach().isfinite().all()):
            kind = "nan" if bool(tensor.detach().isnan().any()) else "inf"
            self._first = self._checked, f"{name} ({kind})"

    def _output_hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            for tensor in filter(torch.is_tensor, tree_leaves(output)):
                self._check(tensor, f"the output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_hook(f"the gradient of the output of {name}"))

        return hook

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self._check(gradient, name)

        return hook

    def describe(self) -> str:
        """Describe the first non-finite tensor of the step over all ranks. Collective over all ranks."""
        ranks = enumerate(all_gather_object((self._first, socket.gethostname())))
        findings = [(*first, rank, host) for rank, (first, host) in ranks if first is not None]
        if not findings:
            return "every output and every local gradient is finite: a sum over ranks is not"
        _, name, rank, host = min(findings, key=lambda finding: finding[0])
        return f"the first that is not finite is {name} on rank {rank} ({host})"
