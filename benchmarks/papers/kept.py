"""What backward keeps of a forward, counted by storage."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.huggingface import ZeroTPForCausalLM
from zero_tp.models.context import ForwardInputs
from zero_tp.planning.tracking import Allocation, Allocations


def kept_by_backward(function: Callable[..., Tensor], *inputs: Tensor) -> list[Allocation]:
    """Run `function(*inputs)` and return what exists after it only because its backward will want it.

    Who keeps it does not matter: autograd, a `ctx`, a recomputation policy with its store. An input counts if it is
    kept; the output counts only if the function's own backward wants it, because the next function keeps it as its
    input. What there was before (parameters, masks) does not count.

    Args:
        inputs: copied first, so that nobody else holds them; floating ones get gradients.
    """
    with Allocations() as allocations:
        copies = [tensor.detach().requires_grad_(tensor.is_floating_point()).clone() for tensor in inputs]
        node = function(*copies).grad_fn
        del copies
    assert node is not None, "the function has no backward"
    if dist.is_initialized():
        time.sleep(0.02)  # gloo's thread lets go of a tensor some time after the collective's wait()
    return allocations.alive()


def kept_by_layer(model: ZeroTPForCausalLM, number: int, length: int, batch: int) -> list[Allocation]:
    """Return what one layer of the model keeps on this rank of a micro-batch of b = `batch` sequences of s = `length`
    tokens, under the recomputation that is set. Collective over the TP group."""
    topology, weight = model.topology, next(model.transformer.layers[number].parameters())
    shard = length // topology.tensor if topology.sequence else length
    stream = torch.randn(shard, batch, model.spec.hidden, dtype=weight.dtype, device=weight.device)
    context = model.transformer.context(length, stream, ForwardInputs(), sequence=topology.sequence)
    layer = partial(model.transformer.layers[number], context=context)
    return kept_by_backward(layer, stream)
