"""Elementwise work of several operations goes over memory once: operation by operation on pieces that a CPU's cache
holds, or in kernels that torch compiles.

Whole tensors of a step do not fit a CPU's cache, so that each of several operations would read and write memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from zero_tp.errors import UserError

CACHE_ELEMENTS = 2**18
"""Elements of a piece that a CPU core's cache holds: 1 MiB in fp32."""


class Elementwise:
    """How a pure function of tensors is run: its operations one by one, as they are written, piece after piece.

    The function treats each row, the first dimension of its first arguments, alike.
    """

    def starts(self, stop: int, step: int) -> Sequence[int]:
        """Return the first index of each piece of `step` indices below `stop`. A subclass may leave pieces out."""
        return range(0, stop, step)

    def pieces(self, rows: Tensor, elsewhere: int | None = None) -> Iterator[slice]:
        """Yield the rows of each piece of `rows` [n, *], one after another.

        Args:
            elsewhere: elements of a piece on other devices than CPUs; by default all.
        """
        most = CACHE_ELEMENTS * torch.get_num_threads() if rows.device.type == "cpu" else elsewhere
        count = rows.shape[0]
        step = max(1, count if most is None else most * count // max(1, rows.numel()))
        yield from (slice(start, min(count, start + step)) for start in self.starts(max(1, count), step))

    def rows(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        *others: Any,
        elsewhere: int | None = None,
    ) -> Any:
        """Return what `function(*tensors, *others)` does: one or several tensors with n rows, or None where it writes
        into one of `tensors`.

        Args:
            tensors: [n, *].
            elsewhere: elements of a piece on other devices than CPUs; by default all.
        """
        outputs: list[Tensor] = []
        result: Any = None
        for piece in self.pieces(tensors[0], elsewhere):
            result = function(*(tensor[piece] for tensor in tensors), *others)
            if result is None:
                continue
            parts = (result,) if isinstance(result, Tensor) else result
            if not outputs:
                if len(parts[0]) == len(tensors[0]):
                    return result
                outputs = [part.new_empty(len(tensors[0]), *part.shape[1:]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[piece] = part
        if result is None:
            return None
        return outputs[0] if isinstance(result, Tensor) else tuple(outputs)

    def total(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], *others: Any) -> Tensor:
        """Return what `function(*tensors, *others)` does: a sum over the rows."""
        sums = (function(*(tensor[piece] for tensor in tensors), *others) for piece in self.pieces(tensors[0]))
        total = next(sums)
        for part in sums:
            total += part
        return total


class Compiled(Elementwise):
    """Runs kernels that `torch.compile` makes of a function, one for each shape, at its first call."""

    def rows(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        *others: Any,
        elsewhere: int | None = None,
    ) -> Any:
        return _compiled(function)(*map(_plain, tensors), *map(_plain, others))

    def total(self, function: Callable[..., Tensor], tensors: Sequence[Tensor], *others: Any) -> Tensor:
        total: Tensor = self.rows(function, tensors, *others)
        return total


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # A second number of rows, such as masked tokens in each batch, makes one kernel for all others.
    return torch.compile(function, fullgraph=True)


def _twice(tensor: Tensor) -> Tensor:
    return tensor + tensor


IN_PIECES, COMPILED = Elementwise(), Compiled()


class ElementwiseModule(nn.Module):
    """This module does elementwise work, in training as `set_training_elementwise` says.

    Evaluation compiles nothing: its shapes are many, and a model's scores are the same whoever trained it.
    """

    training_elementwise: Elementwise = IN_PIECES

    @property
    def elementwise(self) -> Elementwise:
        """How the functions of this module are run now."""
        return self.training_elementwise if self.training else IN_PIECES


def set_training_elementwise(model: nn.Module, elementwise: Elementwise) -> None:
    """Set how training runs the elementwise work of a model's modules."""
    for module in model.modules():
        if isinstance(module, ElementwiseModule):
            module.training_elementwise = elementwise


def is_compiled(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether a run on `device` compiles its elementwise work; "auto": on CUDA alone."""
    return device.type == "cuda" if setting == "auto" else setting


def compile_elementwise(model: nn.Module, device: torch.device) -> None:
    """Let the elementwise work of a model's training run in compiled kernels.

    Raises:
        UserError: torch can't compile for the device here.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # a second's import, that other runs do without

    try:
        COMPILED.rows(_twice, (torch.ones(1, device=device),))
    except (BackendCompilerFailed, OSError) as error:
        cause = getattr(error, "inner_exception", error)
        raise UserError(
            f"zero_tp.compile: torch can't compile for {device.type} here ({cause}): set it to false"
        ) from error
    set_training_elementwise(model, COMPILED)
