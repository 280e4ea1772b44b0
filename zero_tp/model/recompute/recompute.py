"""Recompute activations in backward (arXiv 2205.05198, section 5).

Both mechanisms wrap the `forward` of modules of a built model:

- `recompute` keeps the inputs of a module (a layer, an attention core) in a store and runs the
  module again. Collectives inside it happen again, on every rank in the same order.
- `RecomputedOutput` drops the output of an elementwise module and computes it again from its input
  for the gradient of the next weight: one elementwise pass, no communication.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from zero_tp.model.recompute.stores import Store
from zero_tp.parallel.random import RandomStreams

Forward = Callable[..., Tensor]


def current_forward(module: nn.Module) -> Forward:
    """Return the forward that a call of the module runs now.

    It is the module's own attribute, or else its class's as a partial: unlike a closure, that
    follows a deep copy of the module.
    """
    return vars(module).get("forward") or partial(type(module).forward, module)


class _Recompute(torch.autograd.Function):
    """Run a function without a graph, as torch runs `forward`; in backward run it again with one,
    and its backward.

    Two layers keep their inputs x0 and x1, and at any time the activations of one layer at most:

        forward     put x0, layer 1 without a graph → x1;  put x1, layer 2 without a graph → x2
        backward    take x1, layer 2 with a graph, its backward → gradient of x1
                    take x0, layer 1 with a graph, its backward → gradient of x0

    Thanks to the nested backward ZeRO-3 gathers and releases each parameter around its module in
    both passes. torch's non-reentrant checkpoint would keep aliases of all gathered weights until
    their gradients are computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        function: Forward,
        streams: RandomStreams,
        store: Store,
        anchor: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        ctx.function = function
        ctx.streams = streams
        ctx.store = store
        # Before the function draws its dropout masks, so that backward draws the same.
        ctx.states = streams.snapshot()
        # Not `save_for_backward`: the store decides where the inputs stay. Put before the function
        # runs, they can leave for the host meanwhile.
        ctx.handles = [store.put(tensor.detach()) for tensor in inputs]
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # With `inputs=` only some gradients are wanted, but the nested backward would add to those
        # of all weights. torch's reentrant checkpoint refuses it by the same call.
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "recomputed activations need loss.backward(), without inputs= and not "
                "autograd.grad()"
            )
        if ctx.handles is None:
            raise RuntimeError(
                "backward a second time through recomputed activations: they are freed by the first"
            )
        # After function, streams, store and the anchor.
        needed = ctx.needs_input_grad[4:]
        # Freed with this call, although the graph may live longer.
        handles, ctx.handles = (ctx.handles, None)
        inputs = [ctx.store.take(handle) for handle in handles]
        # New leaves: the nested backward ends at them, and leaves their gradients in `grad`.
        inputs = [
            tensor.detach().requires_grad_(needs)
            for tensor, needs in zip(inputs, needed, strict=True)
        ]
        # The outer streams are restored afterwards, so later draws do not depend on what is
        # recomputed.
        with torch.enable_grad(), ctx.streams.replaying(ctx.states):
            output = ctx.function(*inputs)
        if output.requires_grad:  # not so if everything up to here is frozen
            torch.autograd.backward(output, gradient)
        return (None, None, None, None, *(tensor.grad for tensor in inputs))


def recompute(
    forward: Forward, streams: RandomStreams, store: Store, *inputs: Tensor, **options: Any
) -> Tensor:
    """Run `forward`; keep its inputs in `store`, and run it again in backward with the same dropout
    of `streams`.

    Positional arguments are tensors and get gradients; keyword arguments are kept as they are.
    """
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    # autograd calls a function's backward only if one of its inputs needs a gradient: the anchor
    # always does. Parameters inside need theirs even if no input does (a frozen embedding).
    anchor = torch.empty(0, device=inputs[0].device, requires_grad=True)
    output: Tensor = _Recompute.apply(partial(forward, **options), streams, store, anchor, *inputs)
    return output


class RecomputedOutput:
    """Drop the output of a module, the producer, and recompute it for the next, the consumer.

    The producer must draw no random numbers. Its own backward keeps its input anyway.

    An MLP of x W₁ᵀ = u (up), y = GELU(u) (producer), y W₂ᵀ (down, the consumer):

        kept by     plain      so
        GELU        u          u
        down        y, W₂      shape, strides and offset of y;  W₂
        backward               y = GELU(u) again, for the gradient of W₂
    """

    def __init__(self, producer: nn.Module, consumer: nn.Module):
        self.producer = producer
        self._produce = current_forward(producer)
        self._consume = current_forward(consumer)
        self._last: tuple[Tensor, Tensor] | None = (
            None  # the producer's input and output, until the consumer runs
        )

    def produce(self, source: Tensor, **options: Any) -> Any:
        """Run the producer's forward, and remember its input and its output.

        A norm may return both: the sum that it has normed, and the norm.
        """
        output: Any = self._produce(source, **options)
        if torch.is_grad_enabled():
            if isinstance(output, Tensor):
                self._last = (source, output)
            else:
                normed_sum, norm = output
                self._last = (normed_sum, norm)  # the sum is the norm's input
        return output

    def consume(self, *inputs: Any, **options: Any) -> Tensor:
        """Run the consumer's forward; its backward recomputes the producer's output."""
        last = self._last
        self._last = None
        if last is None:
            return self._consume(*inputs, **options)
        source, produced = last
        # By storage, because consumers save views of the output, such as its rows as one matrix.
        dropped = produced.untyped_storage()._cdata  # unique while `produced` lives
        saved = source.detach()
        needs_gradient = source.requires_grad

        def pack(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != dropped:
                return tensor
            return tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            # ZeRO-3 gathers the weights at each call, and releases them when its inputs that need
            # gradients have them.
            with torch.enable_grad():
                output: Tensor = self.producer(saved.detach().requires_grad_(needs_gradient))
            # The producer's forward is `produce`, which has remembered its output again.
            self._last = None
            return output.detach().as_strided(*packed)

        with saved_tensors_hooks(pack, unpack):
            return self._consume(*inputs, **options)
