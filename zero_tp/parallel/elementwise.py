"""Elementwise work of several operations goes over memory once: operation by operation on pieces that a CPU's cache
holds, or in kernels that torch compiles.

Whole tensors of a step do not fit a CPU's cache, so that each of several operations would read and write memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zero_tp.errors import UserError

CACHE_ELEMENTS = 2**18
"""Elements of a piece that a CPU core's cache holds: 1 MiB in fp32."""


def pieces(rows: Tensor, elsewhere: int | None = None) -> Iterator[slice]:
    """Yield the rows of each piece of `rows` [n, *], one after another.

    Args:
        elsewhere: elements of a piece on other devices than CPUs; by default all.
    """
    most = CACHE_ELEMENTS * torch.get_num_threads() if rows.device.type == "cpu" else elsewhere
    count = rows.shape[0]
    step = max(1, count if most is None else most * count // max(1, rows.numel()))
    yield from (slice(start, min(count, start + step)) for start in range(0, max(1, count), step))


class Elementwise:
    """How a pure function of tensors is run: its operations one by one, as they are written, piece after piece.

    The function treats each row, the first dimension of its first arguments, alike.
    """

    def rows(
        self,
        function: Callable[..., Any],
        given: Sequence[Tensor],
        *others: Any,
        elsewhere: int | None = None,
    ) -> Any:
        """Return what `function(*given, *others)` does: one or several tensors with as many rows as `given`, or None
        where it writes into one of them.

        Args:
            given: [n, *] each.
            elsewhere: elements of a piece on other devices than CPUs; by default all.
        """
        outputs: list[Tensor] = []
        found: Any = None
        for piece in pieces(given[0], elsewhere):
            found = function(*(each[piece] for each in given), *others)
            if found is None:
                continue
            parts = (found,) if isinstance(found, Tensor) else found
            if not outputs:
                if len(parts[0]) == len(given[0]):
                    return found
                outputs = [part.new_empty(len(given[0]), *part.shape[1:]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[piece] = part
        if found is None:
            return None
        return outputs[0] if isinstance(found, Tensor) else tuple(outputs)

    def total(self, function: Callable[..., Tensor], given: Sequence[Tensor], *others: Any) -> Tensor:
        """Return what `function(*given, *others)` does: a sum over the rows."""
        found = (function(*(each[piece] for each in given), *others) for piece in pieces(given[0]))
        total = next(found)
        for part in found:
            total += part
        return total


class Compiled(Elementwise):
    """Runs kernels that `torch.compile` makes of a function, one for each shape, at its first call."""

    def rows(
        self,
        function: Callable[..., Any],
        given: Sequence[Tensor],
        *others: Any,
        elsewhere: int | None = None,
    ) -> Any:
        return _compiled(function)(*map(_plain, given), *map(_plain, others))

    def total(self, function: Callable[..., Tensor], given: Sequence[Tensor], *others: Any) -> Tensor:
        total: Tensor = self.rows(function, given, *others)
        return total


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _twice(tensor: Tensor) -> Tensor:
    return tensor + tensor


IN_PIECES, COMPILED = Elementwise(), Compiled()


class ElementwiseModule(nn.Module):
    """This module does elementwise work, in training by compiled kernels if `compile_elementwise` says so.

    Evaluation compiles nothing: its shapes are many, and a model's scores are the same whoever trained it.
    """

    compiled = False

    @property
    def elementwise(self) -> Elementwise:
        """How the functions of this module are run now."""
        return COMPILED if self.compiled and self.training else IN_PIECES


def compile_elementwise(model: nn.Module, device: torch.device) -> None:
    """Let the elementwise work of a model's training run in compiled kernels.

    Raises:
        UserError: torch can't compile for the device here.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # a second's import, that other runs do without

    try:
        COMPILED.rows(_twice, (torch.ones(1, device=device),))
    except (BackendCompilerFailed, OSError) as error:
        told = getattr(error, "inner_exception", error)
        raise UserError(
            f"zero_tp.compile: torch can't compile for {device.type} here ({told}): set it to false"
        ) from error
    for module in model.modules():
        if isinstance(module, ElementwiseModule):
            module.compiled = True
