"""AdamW of a piece of a partition, in place: masters, moments and the rounded weights.

In fp32 the masters are the weights.

`options` are an optimizer's group: "lr", "betas", "eps", "weight_decay".

Compiled it is one kernel; otherwise torch's fused kernel updates an fp32 copy of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def update_adamw_eagerly(
    gradient: Tensor,
    master: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    options: Mapping[str, Any],
    factor: float,
) -> None:
    """Update a block by torch's fused kernel, with an fp32 copy of its gradient alone. All [n]."""
    wide = gradient.float()
    if factor != 1.0:
        wide.mul_(factor)
    beta1, beta2 = options["betas"]
    torch._fused_adamw_(
        [master],
        [wide],
        [first],
        [second],
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


def adamw_scalars(
    options: Mapping[str, Any], count: int, factor: float, device: torch.device
) -> Tensor:
    """Return the numbers of `adamw`, computed in fp64, fp32 [8] on the device.

    As a tensor, because numbers would be compiled into the kernel: a new rate would compile anew.
    """
    lr = float(options["lr"])
    beta1, beta2 = options["betas"]
    numbers = [
        factor,
        1 - lr * options["weight_decay"],
        1 - beta1,
        beta2,
        1 - beta2,
        lr / (1 - beta1**count),
        math.sqrt(1 - beta2**count),
        options["eps"],
    ]
    scalars = torch.tensor(numbers, pin_memory=device.type == "cuda")
    return scalars.to(device, non_blocking=True)


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
        scalars: of `adamw_scalars`.
    """
    factor, decay, rate1, beta2, rate2, step_size, correction, eps = scalars.unbind()
    wide = gradient.float() * factor
    first = first + rate1 * (wide - first)
    second = beta2 * second + rate2 * wide * wide
    denominator = second.sqrt() / correction + eps
    return master * decay - step_size * first / denominator, first, second
