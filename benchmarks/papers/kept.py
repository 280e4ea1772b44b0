"""Measure the storages that a forward keeps for its backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.model.context import ForwardInputs
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.tools.planning.tracking import Allocation, Allocations


def kept_by_backward(function: Callable[..., Tensor], *inputs: Tensor) -> list[Allocation]:
    """Run `function(*inputs)` and return the storages that exist after it only because its backward
    needs them.

    Autograd, a `ctx` or the store of a recomputation policy may keep them. Inputs count if they are
    kept. The output counts only if the function's own backward needs it; otherwise the next
    function counts it as its input. Storages that existed before, such as parameters, do not count.

    Args:
        inputs: copied first, so that there are no other references; floating-point copies require
            gradients.
    """
    with Allocations() as allocations:
        copies = [
            tensor.detach().requires_grad_(tensor.is_floating_point()).clone() for tensor in inputs
        ]
        node = function(*copies).grad_fn
        del copies
    assert node is not None, "the function has no backward"
    if dist.is_initialized():
        time.sleep(0.02)  # gloo's thread frees a tensor some time after the collective's wait()
    return allocations.alive()


def kept_by_layer(
    model: ZeroTPForCausalLM, number: int, length: int, batch: int
) -> list[Allocation]:
    """Return the storages that one layer keeps of a micro-batch on this rank, under the model's
    recomputation.

    Collective over the TP group.

    Args:
        length, batch: s and b.
    """
    topology = model.topology
    weight = next(model.transformer.layers[number].parameters())
    shard = length // topology.tensor if topology.sequence else length
    stream = torch.randn(shard, batch, model.spec.hidden, dtype=weight.dtype, device=weight.device)
    context = model.transformer.context(length, stream, ForwardInputs(), sequence=topology.sequence)
    layer = partial(model.transformer.layers[number], context=context)
    return kept_by_backward(layer, stream)
