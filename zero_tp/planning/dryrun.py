"""The dry run: forward and backward of the project's own model as rank 0 of the real world, without any data.

The process group is torch's "fake" one, where collectives return at once, and tensors are fake ones on the device
"cpu", which have shapes but no memory; what is measured is equal to that with real tensors. Not the meta device (it
decomposes attention and counts its scores). Model states and ZeRO's buffers are not in it: DeepSpeed's engine does not
run on fake tensors; they come from planning/zero.py.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from zero_tp.activations.memory import ActivationMemory
from zero_tp.config import RunConfig
from zero_tp.data.batch import Batch
from zero_tp.models.attention import SDPACore
from zero_tp.models.wrapper import ZeroTPForCausalLM
from zero_tp.planning.memory import CATEGORIES, Point, held_bytes
from zero_tp.planning.tracking import Allocation, Allocations
from zero_tp.planning.zero import ZeroMemory
from zero_tp.topology import Topology

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class _Unfilled:
    """A source that leaves new parameters as they are."""

    def fill(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Moment:
    """What exists at one point of a pass, beside parameters, gradients that are done and model states [bytes].

    Attributes:
        name: "forward" or "backward". place: the layer's number, -1 before the first and L after the last.
        activations: what backward will want. transients: everything else.
        gradients: elements of parameters whose gradients are done.
    """

    name: str
    place: int
    activations: int
    transients: int
    gradients: int


@dataclass(frozen=True)
class DryRun:
    """What one micro-batch does on rank 0.

    Attributes:
        moments: every moment at which something was made, in order.
        parameters: elements of this rank's shards.
        seconds: that it took.
    """

    moments: tuple[Moment, ...]
    parameters: int
    seconds: float


@contextmanager
def fake_ranks(world: int) -> Iterator[None]:
    """Rank 0 of a world whose other ranks do not exist: collectives return at once and leave garbage.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without a process group")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(config: RunConfig, *, fused_attention: bool = False) -> DryRun:
    """One micro-batch, forward and backward, of the run's model and recomputation.

    Args:
        config: loaded with a world size.
        fused_attention: take attention without its dropout, as accelerators' fused kernels keep no mask of it; else
            what the CPU's kernels keep is measured.
    """
    assert config.world_size is not None
    start = time.perf_counter()
    parallel, block = config.zero_tp.parallel, config.zero_tp
    with fake_ranks(config.world_size), FakeTensorMode():
        topology = Topology(parallel.tensor, parallel.sequence)
        model = ZeroTPForCausalLM(config.hf_config(), topology, source=_Unfilled(), dtype=DTYPES[config.dtype])
        model.train()
        if fused_attention:
            for module in model.modules():
                if isinstance(module, SDPACore):
                    module.p = 0.0
        settings = config.deepspeed_config().get("activation_checkpointing", {})
        ActivationMemory(model, block.recompute_policy, settings, torch.device("cpu"))
        tokens = torch.zeros(config.micro_batch, block.data.sequence_length, dtype=torch.long)
        apart = block.data.document_attention == "reset"
        moments = measure(model, Batch(tokens, tokens, *([tokens, tokens] if apart else [])))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return DryRun(moments, parameters, time.perf_counter() - start)


def measure(model: ZeroTPForCausalLM, batch: Batch) -> tuple[Moment, ...]:
    """Forward and backward of one micro-batch; each gradient is let go of as soon as it is done."""
    done: list[tuple[int, int, int]] = []
    hooks: list[Any] = []
    places = place_of_parameters(model)
    with Allocations() as allocations:
        allocations.mark(model.parameters(), "parameters")
        allocations.mark(model.buffers(), "parameters")

        def let_go(parameter: nn.Parameter) -> None:
            parameter.grad = None
            done.append((allocations.clock, parameter.numel(), places[parameter]))

        for parameter in model.parameters():
            hooks.append(parameter.register_post_accumulate_grad_hook(let_go))
        begin = allocations.clock
        started: list[int] = []
        for module in (*model.transformer.layers, model.transformer.final_norm):
            hooks.append(module.register_forward_pre_hook(lambda *_: started.append(allocations.clock)))
        loss = model(
            batch.input_ids,
            shift_labels=batch.labels,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
        ).loss
        forward = allocations.clock
        loss.backward()
        del loss
    for hook in hooks:
        hook.remove()
    return _moments(allocations, begin, forward, done, started[: len(model.transformer.layers) + 1])


def place_of_parameters(model: ZeroTPForCausalLM) -> dict[nn.Parameter, int]:
    """The layer's number of each parameter, -1 before the first and L after the last; a tied one is before."""
    layers, places = len(model.transformer.layers), {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        after = parts[1] == "final_norm" or parts[0] == "head"
        places[parameter] = int(parts[2]) if parts[1] == "layers" else layers if after else -1
    return places


def _moments(
    allocations: Allocations, begin: int, forward: int, done: Sequence[tuple[int, int, int]], started: Sequence[int]
) -> tuple[Moment, ...]:
    def kept(one: Allocation) -> bool:
        return one.made <= forward and (one.gone is None or one.gone > forward)

    sizes = {True: 0, False: 0}
    moments: list[Moment] = []
    waiting, finished = list(done), 0
    for clock, one, sign in allocations.timeline():
        if one.category is not None or clock <= begin:
            continue
        while waiting and waiting[0][0] < clock:
            finished += waiting.pop(0)[1]
        sizes[kept(one)] += sign * one.bytes
        if sign < 0:
            continue
        if clock <= forward:
            place = bisect.bisect_left(started, clock) - 1
            moments.append(Moment("forward", place, sizes[True], sizes[False], 0))
        else:
            place = waiting[0][2] if waiting else -1
            moments.append(Moment("backward", place, sizes[True], sizes[False], finished))
    return tuple(moments)


def points(run: DryRun, zero: ZeroMemory) -> list[Point]:
    """The measured micro-batch with ZeRO's account added, as the last micro-batch of a step."""
    found = []
    for number, moment in enumerate(run.moments):
        micro, transients = zero.at.accumulation - 1, float(moment.transients)
        held = zero.during(moment.name, moment.gradients, moment.place, micro, transients)
        sizes = {**held_bytes(held), "activations": float(moment.activations), "transients": transients}
        found.append(Point(moment.name, 2.0 * number / len(run.moments), sizes, held.host))
    none = dict.fromkeys(CATEGORIES, 0.0)
    for phase, held in (("reduce", zero.end_of_backward()), ("step", zero.step()), ("step", zero.states)):
        found.append(Point(phase, 2.5, {**none, **held_bytes(held)}, held.host))
    return found
