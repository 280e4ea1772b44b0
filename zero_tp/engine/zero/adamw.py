"""AdamW of flat tensors, block by block and in place: masters, moments and the rounded weights.

In fp32 the masters are the weights.

`options` are an optimizer's group: "lr", "betas", "eps", "weight_decay".

Compiled it is one kernel; otherwise torch's fused kernel updates chunks, whose gradients are copied
to fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from zero_tp.engine.zero.facts import UPDATE_ELEMENTS
from zero_tp.parallel.elementwise import ElementwiseOps


class FlatAdamW:
    """Updates blocks of the flat masters of torch's fused AdamW, and keeps its states.

    Args:
        optimizer: torch's fused AdamW; this class stands in for its `step`.
        elementwise: compiles the update; None: torch's fused kernel runs it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, elementwise: ElementwiseOps | None):
        self._optimizer = optimizer
        self._elementwise = elementwise
        self._updates: dict[Tensor, tuple[Tensor, int]] = {}
        self._scalars: tuple[list[float], Tensor] | None = None

    @staticmethod
    def is_supported(optimizer: Any) -> bool:
        """Return whether an optimizer is torch's fused AdamW, without amsgrad and maximize."""
        # Others, such as DeepSpeed's FusedAdam, SGD, or Adam with L2 decay, keep DeepSpeed's step.
        return type(optimizer) is torch.optim.AdamW and all(
            group["fused"] and not (group["amsgrad"] or group["maximize"])
            for group in optimizer.param_groups
        )

    def begin(
        self, flat: Tensor, options: Mapping[str, Any], factor: float
    ) -> Callable[[Tensor, slice, Tensor | None], None]:
        """Count an update of `flat`; return the function that updates a block of it.

        That takes the block's gradient [n], its elements of `flat`, and its rounded weights [n], or
        None if they are the masters.

        Args:
            factor: multiplies the gradients: it clips, and undoes a loss scale.
        """
        state = self._state(flat)
        count = self._count_update(flat, state["step"])
        tensors = [
            tensor.detach().view(-1) for tensor in (flat, state["exp_avg"], state["exp_avg_sq"])
        ]
        scalars = None
        if self._elementwise is not None:
            scalars = self._device_scalars(adamw_scalars(options, count, factor), flat.device)

        def update(gradient: Tensor, elements: slice, weight: Tensor | None) -> None:
            parts = [gradient, *(tensor[elements] for tensor in tensors)]
            rounded = [] if weight is None else [weight]
            # A compiled kernel would clone what does not begin at 16 bytes, as the partition of one
            # of 6 replicas may, and copy it back.
            is_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (*parts, *rounded))
            if self._elementwise is None or not is_aligned:
                update_adamw_eagerly(state["step"], options, factor, *parts, *rounded)
            else:
                compiled = update_and_round_compiled if rounded else update_adamw_compiled
                self._elementwise.map_rows(compiled, [*parts, *rounded], scalars)

        return update

    def _state(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the optimizer's state of a flat tensor, made as torch's AdamW makes it."""
        state: dict[str, Tensor] = self._optimizer.state[flat]
        for kind in ("exp_avg", "exp_avg_sq"):
            if kind not in state:
                state[kind] = torch.zeros_like(flat, requires_grad=False)
        if "step" not in state:
            state["step"] = torch.zeros((), device=flat.device)
        return state

    def _count_update(self, flat: Tensor, step: Tensor) -> int:
        """Count an update; return its number.

        The tensor stays where torch's kernel reads it. Reading it would wait for the device, so a
        number beside it is counted, too.
        """
        last_step, count = self._updates.get(flat, (None, 0))
        if last_step is not step:  # the first update, or a checkpoint was restored
            count = int(step)
        self._updates[flat] = (step, count + 1)
        step += 1
        return count + 1

    def _device_scalars(self, numbers: list[float], device: torch.device) -> Tensor:
        """Return the numbers on the device, fp32; those of the call before are not sent again."""
        if self._scalars is None or self._scalars[0] != numbers:
            # As a tensor, because numbers would be compiled into the kernel: a new rate would
            # compile anew.
            scalars = torch.tensor(numbers, pin_memory=device.type == "cuda")
            self._scalars = (numbers, scalars.to(device, non_blocking=True))
        return self._scalars[1]


def update_adamw_eagerly(
    step: Tensor,
    options: Mapping[str, Any],
    factor: float,
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    weight: Tensor | None = None,
) -> None:
    """Update a block by torch's fused kernel, with an fp32 copy of a chunk's gradient alone. All
    [n].

    Args:
        weight: gets the rounded master; None: the master is the weight.
    """
    beta1, beta2 = options["betas"]
    for start in range(0, len(gradient), UPDATE_ELEMENTS):
        elements = slice(start, start + UPDATE_ELEMENTS)
        wide = gradient[elements].float()
        if factor != 1.0:
            wide.mul_(factor)
        torch._fused_adamw_(
            [master[elements]],
            [wide],
            [first[elements]],
            [second[elements]],
            [],
            [step],
            lr=float(options["lr"]),
            beta1=beta1,
            beta2=beta2,
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            amsgrad=False,
            maximize=False,
        )
    if weight is not None:
        weight.copy_(master)


def adamw_scalars(options: Mapping[str, Any], count: int, factor: float) -> list[float]:
    """Return the 8 numbers of `adamw`, for the update with number `count`."""
    lr = float(options["lr"])
    beta1, beta2 = options["betas"]
    return [
        factor,
        1 - lr * options["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**count),
        math.sqrt(1 - beta2**count),
        options["eps"],
    ]


def update_adamw_compiled(
    gradient: Tensor, master: Tensor, first: Tensor, second: Tensor, scalars: Tensor
) -> None:
    """Write `adamw`'s results in place. All [n]."""
    updated = adamw(gradient, master, first, second, scalars)
    for tensor, value in zip((master, first, second), updated, strict=True):
        tensor.copy_(value)


def update_and_round_compiled(
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    scalars: Tensor,
) -> None:
    """Write `adamw`'s results in place, and the rounded masters into the weights. All [n].

    Compiled it moves 28 bytes an element in bf16: it reads the gradient, reads and writes master
    and moments, and writes the weight.
    """
    update_adamw_compiled(gradient, master, first, second, scalars)
    weight.copy_(master)


def adamw(
    gradient: Tensor, master: Tensor, first: Tensor, second: Tensor, scalars: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return master and moments after a step of AdamW (arXiv 1711.05101, algorithm 2).

    Args:
        scalars: the numbers of `adamw_scalars`, fp32 [8].
    """
    factor, decay, rate1, beta2, rate2, step_size, correction, eps = scalars.unbind()
    wide = gradient.float() * factor
    first = first + rate1 * (wide - first)
    second = beta2 * second + rate2 * wide * wide
    denominator = second.sqrt() / correction + eps
    return master * decay - step_size * first / denominator, first, second
