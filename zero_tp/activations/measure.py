"""What backward keeps of a forward, counted by storage.

A model on the meta device is measured without data, but there `scaled_dot_product_attention` takes its maths path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from zero_tp.models.wrapper import ZeroTPForCausalLM


@dataclass(frozen=True)
class Kept:
    """One storage that backward keeps.

    Attributes:
        bytes: its size; a view may use a part of it only.
        operation, shape, dtype: what made it, and of the tensor that it was made for.
    """

    bytes: int
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Storages(TorchDispatchMode):
    """Notes the storages that operations make. A state of a random generator is none: no operation makes it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, Kept]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_iter(results):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                kept = Kept(storage.nbytes(), str(function), tuple(tensor.shape), tensor.dtype)
                # Even a weak reference keeps an address from being used again.
                self._made[storage._cdata] = (StorageWeakRef(storage), kept)
        return results

    def alive(self) -> list[Kept]:
        return [kept for reference, kept in self._made.values() if not reference.expired()]


def kept_by_backward(function: Callable[..., Tensor], *inputs: Tensor) -> list[Kept]:
    """Runs `function(*inputs)` and tells what exists after it only because its backward will want it.

    Who keeps it does not matter: autograd, a `ctx`, a recomputation policy with its store. An input counts if it is
    kept; the output counts only if the function's own backward wants it, because the next function keeps it as its
    input. What there was before (parameters, masks) does not count.

    Args:
        inputs: copied first, so that nobody else holds them; floating ones get gradients.
    """
    with _Storages() as storages:
        copies = [tensor.detach().requires_grad_(tensor.is_floating_point()).clone() for tensor in inputs]
        node = function(*copies).grad_fn
        del copies
    assert node is not None, "the function has no backward"
    if dist.is_initialized():
        time.sleep(0.02)  # gloo's thread lets go of a tensor some time after the collective's wait()
    return storages.alive()


def kept_by_layer(model: ZeroTPForCausalLM, number: int, length: int, batch: int) -> list[Kept]:
    """What one layer of the model keeps on this rank of a micro-batch of b = `batch` sequences of s = `length` tokens,
    under the recomputation that is set. Collective over the TP group."""
    topology, weight = model.topology, next(model.transformer.layers[number].parameters())
    shard = length // topology.tensor if topology.sequence else length
    stream = torch.randn(shard, batch, model.spec.hidden, dtype=weight.dtype, device=weight.device)
    context = model.transformer.context(length, stream, sequence=topology.sequence)
    layer = partial(model.transformer.layers[number], context=context)
    return kept_by_backward(layer, stream)
