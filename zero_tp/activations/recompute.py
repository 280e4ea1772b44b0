"""Recomputation: a region keeps its inputs and is run again in backward (arXiv 2205.05198, section 5).

Two mechanisms, for the two kinds of region in models/regions.py:

- `Recomputed` keeps the inputs of a span (a layer, an attention core) in a store and runs the span again.
- `Remade` keeps everything but the output of an elementwise function, which is made again from its input when the
  gradient of the weight after it wants it. It costs one elementwise pass and no communication.

Collectives inside a region happen again, on every rank at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero_tp.activations.store import Store
from zero_tp.parallel.random import RandomStreams


class _Run(torch.autograd.Function):
    """Runs a span without a graph, and in backward again with one, whose gradients it takes at once.

    The nested backward is what DeepSpeed's own checkpointing does: ZeRO-3 gathers and releases each parameter around
    its module in both passes. torch's non-reentrant checkpoint would hold all gathered weights of the span until their
    gradients are taken, because it keeps aliases of them.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Tensor], streams: RandomStreams, store: Store, _: Tensor, *inputs: Tensor
    ) -> Tensor:
        ctx.function, ctx.streams, ctx.store = function, streams, store
        ctx.states = streams.snapshot()
        ctx.kept = [store.put(tensor.detach()) for tensor in inputs]
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("recomputed activations need loss.backward(), without inputs= and not autograd.grad()")
        if ctx.kept is None:
            raise RuntimeError("backward a second time through recomputed activations: they are freed by the first")
        needed = ctx.needs_input_grad[4:]
        # Dropped at the end of this call, although the graph may outlive it (a loss that is still held).
        kept, ctx.kept = ctx.kept, None
        inputs = [ctx.store.take(token) for token in kept]
        inputs = [tensor.detach().requires_grad_(needs) for tensor, needs in zip(inputs, needed, strict=True)]
        with torch.enable_grad(), ctx.streams.replaying(ctx.states):
            output = ctx.function(*inputs)
        torch.autograd.backward(output, gradient)
        return (None, None, None, None, *(tensor.grad for tensor in inputs))


class Recomputed:
    """A Span: keeps the inputs in `store`, and replays the dropout of `streams`."""

    def __init__(self, streams: RandomStreams, store: Store):
        self.streams, self.store = streams, store

    def __call__(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return function(*inputs)
        # Parameters inside need gradients also where no input does (a frozen embedding).
        anchor = torch.empty(0, device=inputs[0].device, requires_grad=True)
        output: Tensor = _Run.apply(function, self.streams, self.store, anchor, *inputs)
        return output


class Remade:
    """A Link: what `produce` gave is not kept for `consume`'s backward but made again from its source.

    `produce` draws no random numbers, and its own backward keeps the source anyway.
    """

    def __call__(
        self, produce: Callable[[Tensor], Tensor], source: Tensor, consume: Callable[[Tensor], Tensor]
    ) -> Tensor:
        output = produce(source)
        if not torch.is_grad_enabled():
            return consume(output)
        dropped = output.untyped_storage()._cdata  # lives as long as `output`, so nothing else has it
        kept, needs_gradient = source.detach(), source.requires_grad

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != dropped:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            # With a graph, which is dropped at once: ZeRO-3 counts the inputs of a module that need gradients.
            with torch.enable_grad():
                made = produce(kept.detach().requires_grad_(needs_gradient))
            return made.detach().as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            return consume(output)
