"""Run several elementwise operations in one pass over memory: on chunks that fit a CPU's cache, or
compiled.

Whole tensors do not fit the cache: operations one by one would each read and write memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from zero_tp.base.errors import UserError

# 2^18 to 2^20 are equally fast, smaller and larger ones slower (benchmarks/tried.md).
CACHE_ELEMENTS = 2**19
"""Elements of a chunk that fits a CPU core's cache: 2 MiB in fp32."""


Function = TypeVar("Function", bound=Callable[..., Any])
INDUCTOR_OPTIONS = "inductor_options"
SHARES_MEMORY = "shares_memory"


class ElementwiseOps:
    """Run functions of tensors eagerly, on one chunk of rows (indices of dimension 0) at a time.

    A row of a function's result depends on the same row of its tensors only.

    Args:
        choose: returns the chunks to compute, of the first indices of all; by default all of them.
    """

    def __init__(self, choose: Callable[[Sequence[int]], Sequence[int]] | None = None):
        self._choose = choose

    def chunk_starts(self, stop: int, step: int) -> Sequence[int]:
        """Return the first index of each computed chunk of `step` indices below `stop`."""
        starts = range(0, stop, step)
        return starts if self._choose is None else self._choose(starts)

    def chunks(
        self,
        rows: Tensor,
        accelerator_elements: int | None = None,
        row_elements: int | None = None,
    ) -> Iterator[slice]:
        """Yield the rows of each chunk of `rows` [n, *].

        Args:
            accelerator_elements: elements of a chunk on an accelerator; None: all rows are one
                chunk.
            row_elements: elements that a function makes of a row; None: those of the row.
        """
        # The threads of torch divide a chunk, and each has its core's cache.
        limit = (
            CACHE_ELEMENTS * torch.get_num_threads()
            if rows.device.type == "cpu"
            else accelerator_elements
        )
        # Nearly equal chunks, whose size is the nearest to the limit: 2.2 times the limit are two.
        count = max(1, rows.shape[0])
        elements = rows.numel() if row_elements is None else count * row_elements
        pieces = 1 if limit is None else min(count, max(1, round(elements / limit)))
        step = -(-count // pieces)
        yield from (
            slice(start, min(count, start + step)) for start in self.chunk_starts(count, step)
        )

    def map_rows(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        *others: Any,
        accelerator_elements: int | None = None,
        row_elements: int | None = None,
    ) -> Any:
        """Return `function(*tensors, *others)`: one or several tensors with n rows, or None if it
        works in place.

        Args:
            tensors: [n, *].
            accelerator_elements, row_elements: see `chunks`.
        """
        outputs: list[Tensor] = []
        result: Any = None
        for chunk in self.chunks(tensors[0], accelerator_elements, row_elements):
            result = function(*(tensor[chunk] for tensor in tensors), *others)
            if result is None:
                continue
            parts = (result,) if isinstance(result, Tensor) else result
            if not outputs:
                # One chunk has all rows: its result is not copied.
                if len(parts[0]) == len(tensors[0]):
                    return result
                outputs = [part.new_empty(len(tensors[0]), *part.shape[1:]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[chunk] = part
        if result is None:
            return None
        return outputs[0] if isinstance(result, Tensor) else tuple(outputs)

    def sum_rows(
        self, function: Callable[..., Tensor], tensors: Sequence[Tensor], *others: Any
    ) -> Tensor:
        """Return `function(*tensors, *others)`, which is a sum over the rows."""
        sums = (
            function(*(tensor[chunk] for tensor in tensors), *others)
            for chunk in self.chunks(tensors[0])
        )
        total = next(sums)
        for part in sums:
            total += part
        return total

    def map_and_sum_rows(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        tensors: Sequence[Tensor],
        *others: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return `function(*tensors, *others)`: a tensor with n rows, and a sum over the rows."""
        output = total = None
        for chunk in self.chunks(tensors[0]):
            rows, part = function(*(tensor[chunk] for tensor in tensors), *others)
            if output is None or total is None:
                # One chunk has all rows: its result is not copied.
                if len(rows) == len(tensors[0]):
                    return rows, part
                output = rows.new_empty(len(tensors[0]), *rows.shape[1:])
                total = part
            else:
                total += part
            output[chunk] = rows
        assert output is not None and total is not None, "there is always a chunk"
        return output, total


class CompiledOps(ElementwiseOps):
    """Run functions that torch compiles for the shapes of their first call."""

    def map_rows(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        *others: Any,
        accelerator_elements: int | None = None,
        row_elements: int | None = None,
    ) -> Any:
        return _compiled(function)(*tensors, *others)

    def sum_rows(
        self, function: Callable[..., Tensor], tensors: Sequence[Tensor], *others: Any
    ) -> Tensor:
        total: Tensor = self.map_rows(function, tensors, *others)
        return total

    def map_and_sum_rows(
        self,
        function: Callable[..., tuple[Tensor, Tensor]],
        tensors: Sequence[Tensor],
        *others: Any,
    ) -> tuple[Tensor, Tensor]:
        rows, total = self.map_rows(function, tensors, *others)
        return rows, total


def compiled_with(**options: Any) -> Callable[[Function], Function]:
    """Return a decorator of functions that are compiled with these options of inductor."""

    def mark(function: Function) -> Function:
        setattr(function, INDUCTOR_OPTIONS, options)
        return function

    return mark


def sharing_memory(function: Function) -> Function:
    """Mark a function that changes views of one tensor in place; they have no element in common.

    `torch.compile` sees one tensor there, whose size it compiles in (torch 2.13). So another number
    of rows runs as written.
    """
    setattr(function, SHARES_MEMORY, True)
    return function


class CompiledFunction:
    """A function of tensors and constants whose first number of rows has kernels of its own.

    They are called without `torch.compile`'s wrapper, which takes 50 µs where the look-up and the
    call take 9 (torch 2.13). Another number of rows, as of masked tokens or an expert's, uses that
    wrapper: when a number first changes, it compiles one dynamic kernel for all later ones.

        [64, 32] bf16, [32] bf16    the first: kernels for 64 rows
        [64, 32] fp32, [32] fp32    another dtype: kernels for 64 rows
        [50, 32] bf16, [32] bf16    another number of rows: `torch.compile`
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._options: dict[str, Any] = getattr(function, INDUCTOR_OPTIONS, {})
        self._kernels: dict[tuple[Any, ...], Callable[[Sequence[Any]], Any]] = {}
        # All of a call's signature but its number of rows → that of the first call.
        self._rows: dict[tuple[Any, ...], int] = {}
        self._dynamic: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if not len(arguments[0]):
            # Kernels for no rows would take the place of those of the usual number.
            return self._function(*arguments)
        key = tuple(
            (value.shape, value.stride(), value.dtype, value.device)
            if isinstance(value, Tensor)
            else value
            for value in arguments
        )
        kernel = self._kernels.get(key)
        if kernel is not None:
            return kernel(arguments)
        family = tuple(
            (value.shape[1:], value.dtype, value.device) if isinstance(value, Tensor) else value
            for value in arguments
        )
        rows = len(arguments[0])
        if rows == self._rows.setdefault(family, rows):
            kernel = compile_for(self._function, arguments, self._options)
            self._kernels[key] = kernel
            return kernel(arguments)
        return self._call_dynamic(arguments)

    def _call_dynamic(self, arguments: Sequence[Any]) -> Any:
        if getattr(self._function, SHARES_MEMORY, False):
            return self._function(*arguments)
        if self._dynamic is None:
            options = self._options or None
            self._dynamic = torch.compile(self._function, fullgraph=True, options=options)
        detached = [_detached(value) for value in arguments]
        rows = arguments[0].shape[:1]
        for value in detached:
            if isinstance(value, Tensor) and value.shape[:1] == rows > (1,):
                # Else its first call compiles this number of rows, and its second any number.
                torch._dynamo.maybe_mark_dynamic(value, 0)
        return self._dynamic(*detached)


def compile_for(
    function: Callable[..., Any], arguments: Sequence[Any], options: dict[str, Any]
) -> Callable[[Sequence[Any]], Any]:
    """Return inductor's kernels of `function` for arguments of these shapes, strides and devices.

    They take the sequence of arguments. What is not a tensor is compiled in.

    Args:
        options: inductor's, as `torch.compile` takes them.
    """
    from torch._guards import TracingContext, tracing  # here, because the imports take seconds
    from torch._inductor import config
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    places = [place for place, value in enumerate(arguments) if isinstance(value, Tensor)]
    # Without the argument a shape environment makes every size a symbol.
    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    outputs: Any = None

    def pure(*tensors: Tensor) -> Any:
        nonlocal outputs
        values = list(arguments)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        outputs = function(*values)
        return (outputs,) if isinstance(outputs, Tensor) else outputs or ()

    with torch.no_grad(), config.patch(options), tracing(TracingContext(fake_mode)):
        fakes = [fake_mode.from_tensor(arguments[place].detach()) for place in places]
        with fake_mode:
            trace = make_fx(
                torch.func.functionalize(pure, remove="mutations"),
                decomposition_table=select_decomp_table(),
            )
            graph = trace(*fakes)
        view_to_reshape(graph)
        kernels = compile_graph(graph, fakes)
    is_single = isinstance(outputs, Tensor)
    is_in_place = outputs is None

    def call(values: Sequence[Any]) -> Any:
        results = kernels([values[place] for place in places])
        if is_in_place:
            return None
        return results[0] if is_single else results

    return call


def compile_graph(graph: Any, inputs: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """Return inductor's kernels of a graph of ATen operations, a function of a list of tensors.

    Args:
        inputs: fake tensors.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    kernels: Callable[[list[Tensor]], Any] = compile_fx_inner(graph, inputs, is_inference=True)
    return kernels


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@cache
def _compiled(function: Callable[..., Any]) -> CompiledFunction:
    return CompiledFunction(function)


def _probe(tensor: Tensor) -> Tensor:
    return tensor + tensor


CHUNKED = ElementwiseOps()
# Forward and backward of an RMS norm in bf16 move 14 bytes an element compiled, 138 operation by
# operation (benchmarks/tried.md).
COMPILED = CompiledOps()


class ElementwiseModule(nn.Module):
    """A module whose elementwise functions training may compile (`set_training_elementwise`).

    Evaluation compiles nothing: it has many shapes, and a model's scores must not depend on its
    training options.
    """

    training_elementwise: ElementwiseOps = CHUNKED

    @property
    def elementwise(self) -> ElementwiseOps:
        """Return how this module now runs its elementwise functions."""
        return self.training_elementwise if self.training else CHUNKED


def set_training_elementwise(model: nn.Module, elementwise: ElementwiseOps) -> None:
    """Set how training runs the elementwise work of a model's modules."""
    for module in model.modules():
        if isinstance(module, ElementwiseModule):
            module.training_elementwise = elementwise


def is_compiled(setting: bool | Literal["auto"], device: torch.device) -> bool:
    """Return whether a run on `device` compiles its elementwise work; "auto": on CUDA only."""
    return device.type == "cuda" if setting == "auto" else setting


def compile_elementwise(model: nn.Module, device: torch.device) -> None:
    """Compile the elementwise work of a model's training."""
    from torch._dynamo.exc import ShortenTraceback  # here, because the import takes a second

    try:
        # Tried on one number: a missing compiler then ends the start, and not the first step.
        COMPILED.map_rows(_probe, (torch.ones(1, device=device),))
    except (
        ShortenTraceback,
        OSError,
    ) as error:  # the compiler's errors; an unwritable cache directory
        cause = getattr(error, "inner_exception", error)
        raise UserError(
            f"zero_tp.compile: torch can't compile for {device.type} here ({cause}); set it to "
            "false"
        ) from error
    set_training_elementwise(model, COMPILED)
