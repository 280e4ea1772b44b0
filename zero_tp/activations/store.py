"""Where the inputs of recomputed spans wait for backward. A store's `put` gives a token, `take` the tensor again."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Store(Protocol):
    def put(self, tensor: Tensor) -> Any:
        """Keep a tensor. The caller does not change it afterwards. Returns a token; dropping it frees the space."""

    def take(self, token: Any) -> Tensor:
        """The tensor of a token, bit for bit, on the device where it was."""


class InPlace:
    """Keeps the tensor where it is."""

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self, token: Tensor) -> Tensor:
        return token
