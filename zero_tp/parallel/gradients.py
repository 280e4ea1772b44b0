"""Sum partial gradients over TP during backward, and compute the norm of all gradients over TP.

DeepSpeed never sums them over TP. ZeRO-2 and 3 consume gradients during backward: an all-reduce
after it is too late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, Pending, all_reduce, start_all_reduce
from zero_tp.parallel.elementwise import CHUNKED
from zero_tp.parallel.layout import Replicated, Sharded, layout_of
from zero_tp.parallel.topology import Topology

_ACCELERATOR_ELEMENTS = 2**24


class GradientSum:
    """Sums one layer's partial gradients over TP.

    A layer with a `gradient_sum` calls it in its own backward, to overlap the all-reduce. Other
    parameters get a hook.

    Attributes:
        fired: number of sums since `engine.guards.check_hooks` last reset it.
    """

    def __init__(self, group: Group):
        self.group = group
        self.fired = 0

    def start(self, *gradients: Tensor, async_op: bool = True) -> Pending:
        """Start one all-reduce for n gradients of the same shape. n × [*] → [n, *]."""
        self.fired += 1
        # One message for a layer's weight and bias. Stacking also copies: a hook must not change
        # the gradient that it is given.
        return start_all_reduce(torch.stack(gradients), self.group, async_op=async_op)


class GradientHooks:
    """Sum every partial gradient of a model, by its layer or by a hook.

    ZeRO-2 and 3 see the sum only if the hooks are registered before `deepspeed.initialize`.

    Attributes:
        sums: the GradientSum of each parameter with a partial gradient, by name.
    """

    def __init__(self, model: nn.Module, group: Group):
        self.sums: dict[str, GradientSum] = {}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(prefix, recurse=False):
                layout = layout_of(parameter, f"parameter {name}")
                if id(parameter) in seen or not parameter.requires_grad:
                    continue  # a tied parameter is summed once
                seen.add(id(parameter))
                if isinstance(layout, Replicated) and layout.gradient == "partial":
                    layer_sum = getattr(module, "gradient_sum", None)
                    self.sums[name] = layer_sum or _register_sum(parameter, group)


def _register_sum(parameter: nn.Parameter, group: Group) -> GradientSum:
    gradient_sum = GradientSum(group)
    # This hook runs before torch accumulates the gradient, and DeepSpeed's after it: so DeepSpeed
    # reduces the sum over DP. The hook has to return the sum, so it waits for it.
    parameter.register_hook(lambda gradient: gradient_sum.start(gradient, async_op=False).wait()[0])
    return gradient_sum


@torch.no_grad()
def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of the squares of all elements, fp64 scalar."""
    # In fp64, because torch's fp32 norm was off by 1e-4 on a CPU. In chunks, because a whole copy
    # in fp64 would take 8 bytes an element.
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    column = tensor.reshape(-1, 1)
    for chunk in CHUNKED.chunks(column, _ACCELERATOR_ELEMENTS):
        total += column[chunk].double().square_().sum()
    return total


def is_counted(parameter: nn.Parameter, topology: Topology) -> bool:
    """Return whether this TP rank counts a parameter's gradient in a norm over TP."""
    return isinstance(layout_of(parameter), Sharded) or topology.tensor_rank == 0


@torch.no_grad()
def squared_norms(tensors: Sequence[Tensor], *, exact: bool = False) -> Tensor:
    """Return the sum of the squares of each tensor, fp64 [n].

    On an accelerator one pass in fp32 reads them (7e-10 from fp64 on an H200). A CPU's would be
    wrong by 7e-5.

    Args:
        exact: in fp64 there, too. In fp32 a square above its range makes the norm infinite.
    """
    if exact or tensors[0].device.type == "cpu":
        return torch.stack([sum_of_squares(tensor) for tensor in tensors])
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)
    return torch.stack(norms).double().square()


@torch.no_grad()
def gradient_norm(
    parameters: Sequence[nn.Parameter], topology: Topology, *, exact: bool = False
) -> Tensor:
    """Return the 2-norm of all gradients of the model, fp64 scalar, equal on all TP ranks.

    Shards count on every rank, replicated parameters once. All-reduce of one number over TP. For a
    norm's weight and a matrix split over TP 2, the squares are:

        rank 0    |norm|² + |shard 0|²
        rank 1              |shard 1|²

    Args:
        exact: as in `squared_norms`.
    """
    total = torch.zeros((), dtype=torch.float64, device=next(iter(parameters)).device)
    # A replicated gradient is the same on all ranks (the hooks have summed partial ones): counted
    # on each rank, its part of the norm would be √t times too large. Counted 0 times, one that is
    # not finite on this rank alone still makes the norm nan.
    for weight in (1.0, 0.0):
        gradients = [
            parameter.grad
            for parameter in parameters
            if parameter.grad is not None and is_counted(parameter, topology) == bool(weight)
        ]
        if gradients:
            total += weight * squared_norms(gradients, exact=exact).sum()
    return all_reduce(total, topology.tensor_group).sqrt()


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Scale all gradients in place."""
    # A Python float, because a tensor would be rounded to the gradients' dtype.
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
