"""No door lets an accelerator's tensors travel over gloo: the model of several ranks refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2LMHeadModel

from tests.support.pools import Pools
from tests.support.settings import deepspeed_settings, gpt2_config
from zero_tp import Topology, ZeroTPForCausalLM, ZeroTPTrainer
from zero_tp.base.errors import UserError
from zero_tp.engine.engine import TrainingEngine

CUDA = torch.device("cuda")
MESSAGE = (
    "process group: its backend for cuda is gloo, over which no parallel run on an accelerator "
    "was compared with the plain one; call init_process_group without a backend, and leave "
    "ddp_backend out of TrainingArguments"
)


def build(topology: Topology) -> None:
    ZeroTPForCausalLM(gpt2_config(), topology, device="cuda")


def move(topology: Topology) -> None:
    model: Any = ZeroTPForCausalLM(gpt2_config(), topology)
    model.parameters = lambda: iter([SimpleNamespace(device=CUDA)])
    model.float()


def train(topology: Topology) -> None:
    TrainingEngine.from_dict(gpt2_config(), topology, deepspeed_settings(1), seed=0, device="cuda")


def use_trainer(topology: Topology) -> None:
    args: Any = SimpleNamespace(
        device=CUDA, world_size=topology.world, seed=0, lr_scheduler_type="linear"
    )
    ZeroTPTrainer(GPT2LMHeadModel(gpt2_config()), args, tensor_parallel=topology.tensor)


DOORS: tuple[Callable[[Topology], None], ...] = (build, move, train, use_trainer)


def refusals(tensor: int) -> list[str]:
    """Return each door's message, on every rank. They come before any CUDA call, which fails."""
    messages = []
    for door in DOORS:
        try:
            door(Topology(tensor))
        except UserError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_model_on_an_accelerator_refuses_gloo(ranks: Pools, tensor: int) -> None:
    assert ranks(2).run(refusals, tensor) == [[MESSAGE] * len(DOORS)] * 2


def test_one_process_and_cpus_communicate_over_what_they_have() -> None:
    Topology(world=1).check_backend(CUDA)
    Topology(world=4, rank=1).check_backend(CUDA)  # a description without groups


def test_a_run_connects_cuda_over_nccl() -> None:
    """`connect` takes torch's default, so no config selects gloo for CUDA."""
    assert dist.get_default_backend_for_device(CUDA) == "nccl"
