"""Follow memory over time: when each storage comes into being and goes, of real tensors and of fake ones.

A storage is noted when the first operation that makes it returns, with its size, and again when nothing holds it any
more. What operations use inside themselves (workspaces of kernels) is not seen, nor are allocators' gaps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


@dataclass
class Allocation:
    """One storage.

    Attributes:
        bytes: its size.
        made, gone: positions in the order of all makings and goings; `gone` is None while something holds it.
        operation, shape, dtype: what made it, and of the tensor that it was made for.
        category: set by `Allocations.mark`, else None.
    """

    bytes: int
    made: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gone: int | None = None
    category: str | None = None


class Allocations(TorchDispatchMode):
    """`with Allocations() as allocations: …` notes every storage that is made inside.

    Attributes:
        all: every storage in the order in which they were made.
        clock: makings and goings so far.
        marks: (name, clock) of `note`, in order.
    """

    def __init__(self, device_type: str | None = None) -> None:
        """Begin with no storage known.

        Args:
            device_type: count only storages of this type of device; None counts all but "meta".
        """
        super().__init__()
        self.all: list[Allocation] = []
        self.clock = 0
        self.marks: list[tuple[str, int]] = []
        self._device_type = device_type
        self._alive: dict[int, tuple[Allocation, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for tensor in tree_iter(results):
            if isinstance(tensor, Tensor) and not self._is_from_outside(tensor, args, kwargs):
                self._see(tensor, str(function))
        return results

    def _is_from_outside(self, result: Tensor, args: Any, kwargs: Any) -> bool:
        """Return whether an operation has been given this storage, which none has made inside."""
        address = result.untyped_storage()._cdata
        return address not in self._alive and any(
            isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata == address
            for tensor in tree_iter((args, kwargs))
        )

    def _see(self, tensor: Tensor, operation: str) -> Allocation | None:
        kind = tensor.device.type
        if kind == "meta" or (self._device_type is not None and kind != self._device_type):
            return None
        storage = tensor.untyped_storage()
        found = self._alive.get(storage._cdata)
        if found is not None:
            return found[0]
        self.clock += 1
        allocation = Allocation(storage.nbytes(), self.clock, operation, tuple(tensor.shape), tensor.dtype)
        self.all.append(allocation)
        address = storage._cdata

        def gone(_: Any) -> None:
            self.clock += 1
            allocation.gone = self.clock
            self._alive.pop(address, None)

        self._alive[address] = (allocation, weakref.ref(storage, gone))
        return allocation

    def note(self, name: str) -> None:
        """Give this moment a name."""
        self.marks.append((name, self.clock))

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give storages a category; those that nothing inside has made are taken in as if made now."""
        for tensor in tensors:
            allocation = self._see(tensor, "outside")
            if allocation is not None:
                allocation.category = category

    def known(self) -> set[int]:
        """Return the addresses of the storages that exist."""
        return set(self._alive)

    def alive(self) -> list[Allocation]:
        return [allocation for allocation, _ in self._alive.values()]

    def timeline(self) -> list[tuple[int, Allocation, int]]:
        """Return (clock, allocation, +1 made or -1 gone) in order."""
        events = [(allocation.made, allocation, 1) for allocation in self.all]
        events += [(allocation.gone, allocation, -1) for allocation in self.all if allocation.gone is not None]
        return sorted(events, key=lambda event: event[0])
