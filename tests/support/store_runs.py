"""A run of micro-batches on the simulated accelerator, with its copies and its bytes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.compare import gradient_of
from tests.support.streams import (
    computing_accelerator,
    model_there,
    tensor_there,
)
from zero_tp.base.settings.deepspeed import ActivationCheckpointing
from zero_tp.base.settings.recompute import RecomputePolicy
from zero_tp.model.huggingface import ZeroTPForCausalLM
from zero_tp.model.recompute.activation_memory import ActivationMemory

LAYERS, LENGTH = 3, 10


class Run(NamedTuple):
    """A run of micro-batches.

    Attributes:
        values: the gradients by name, summed over the micro-batches, and under "losses" their
            losses.
        moved: copies that have run after each forward and each backward.
        alive: bytes on the device and on the host at the same moments.
    """

    values: dict[str, Tensor]
    moved: list[int]
    alive: list[tuple[int, int]]


def run_simulated(
    model: ZeroTPForCausalLM,
    tokens: Tensor,
    copies: str,
    settings: dict[str, Any],
    policy: dict[str, Any],
) -> Run:
    """What its copy on the accelerator computes."""
    with computing_accelerator(copies) as computing:
        there = model_there(model, computing)
        ActivationMemory(
            there, RecomputePolicy(**policy), ActivationCheckpointing(**settings), computing.device
        )
        losses, moved, alive = [], [], []
        for one in tensor_there(tokens, computing):
            loss = there(one, shift_labels=one).loss
            moved.append(computing.moved)
            alive.append(computing.alive())
            loss.backward()
            moved.append(computing.moved)
            alive.append(computing.alive())
            losses.append(loss.detach())
        values = [computing.read(loss) for loss in losses]
        gradients = {
            name: computing.read(gradient_of(each)) for name, each in there.named_parameters()
        }
    return Run({"losses": torch.stack(values), **gradients}, moved, alive)
