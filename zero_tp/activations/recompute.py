"""A recomputed module keeps its input and is run again in backward (arXiv 2205.05198, section 5).

Two mechanisms, which wrap the `forward` of modules of a built model, so that no name changes:

- `recomputed` keeps the inputs of a module (a layer, an attention core) in a store and runs the module again.
- `Remade` keeps everything but the output of an elementwise module, which is made again from its input when the
  gradient of the weight after it wants it. It costs one elementwise pass and no communication.

Collectives inside a module happen again, on every rank at the same place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_tp.activations.stores import Store
from zero_tp.parallel.random import RandomStreams

Forward = Callable[..., Tensor]


class _Recompute(torch.autograd.Function):
    """Run a function without a graph, and in backward again with one, whose gradients it takes at once.

    The nested backward is what DeepSpeed's own checkpointing does: ZeRO-3 gathers and releases each parameter around
    its module in both passes. torch's non-reentrant checkpoint would hold all gathered weights until their gradients
    are taken, because it keeps aliases of them.
    """

    @staticmethod
    def forward(
        ctx: Any, function: Forward, streams: RandomStreams, store: Store, _: Tensor, *inputs: Tensor
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


def recomputed(forward: Forward, streams: RandomStreams, store: Store) -> Forward:
    """Return a forward that keeps its inputs in `store` and replays the dropout of `streams` in backward.

    The inputs are its positional arguments, all tensors; what is given by keyword is kept as it is, without gradient.
    """

    def run(*inputs: Tensor, **shared: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return forward(*inputs, **shared)
        # Parameters inside need gradients also where no input does (a frozen embedding).
        anchor = torch.empty(0, device=inputs[0].device, requires_grad=True)
        output: Tensor = _Recompute.apply(partial(forward, **shared), streams, store, anchor, *inputs)
        return output

    return run


class Remade:
    """The output of `producer` is not kept for the backward of `consumer`, which is called next, but made again.

    The producer draws no random numbers, and its own backward keeps its input anyway.
    """

    def __init__(self, producer: nn.Module, consumer: nn.Module):
        self.producer = producer
        self._produce, self._consume = producer.forward, consumer.forward
        self._last: tuple[Tensor, Tensor] | None = None  # the producer's input and output, until the consumer takes it

    def produce(self, source: Tensor) -> Tensor:
        """Run the producer's forward, and remember its input."""
        output: Tensor = self._produce(source)
        if torch.is_grad_enabled():
            self._last = source, output
        return output

    def consume(self, *inputs: Any, **options: Any) -> Tensor:
        """Run the consumer's forward, whose backward will find the output made again."""
        last, self._last = self._last, None
        if last is None:
            return self._consume(*inputs, **options)
        source, output = last
        dropped = output.untyped_storage()._cdata  # lives as long as `output`, so nothing else has it
        kept, needs_gradient = source.detach(), source.requires_grad

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != dropped:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            # Called as a module, so that ZeRO-3 gathers its weights. With a graph, which is dropped at once: ZeRO-3
            # counts the inputs of a module that need gradients.
            with torch.enable_grad():
                made: Tensor = self.producer(kept.detach().requires_grad_(needs_gradient))
            self._last = None
            return made.detach().as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            return self._consume(*inputs, **options)
