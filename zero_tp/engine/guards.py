"""Checks of a training step. If one of these faults goes unnoticed, the run trains another model.

- Over TP: partial gradients are summed, replicated parameters are equal, and all ranks choose the
  same experts.
- Over DP: what several ranks have (their duplicates) is equal bit for bit.
- On each rank: a micro-batch that runs twice has the same gradients.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from zero_tp.base.errors import UserError
from zero_tp.engine.zero.expert_groups import is_divided
from zero_tp.engine.zero.states import partition_of
from zero_tp.engine.zero.zero_engine import ZeroEngine
from zero_tp.model.moe import Router
from zero_tp.model.parallel_model import ParallelModel
from zero_tp.parallel.agreement import checksum, differ_over, tensor_bytes
from zero_tp.parallel.collectives import all_gather
from zero_tp.parallel.layout import Replicated, layout_of, stored_tensors
from zero_tp.parallel.topology import Topology, name_ranks

# On an accelerator, kernels that add in no fixed order can round one rank's gradient differently
# from another's. Between two checks replicas may drift apart by this share of the parameter's
# largest element: about one last bit of a 16-bit weight; in fp32, a thousand steps that each round
# differently by 1e-7. If a gradient is not summed, replicas of a norm drift by a multiple of the
# learning rate in each step, and exceed this share in a few steps.
ACCELERATOR_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def check_hooks(model: ParallelModel) -> None:
    """Check after a backward that every partial gradient was summed over TP since the last check.

    Raises:
        RuntimeError: names a parameter whose partial gradient was not summed over TP.
    """
    sums = model.gradient_hooks.sums
    for name, gradient_sum in sums.items():
        # Not an exact number: a step has several micro-batches, and a layer's parameters may share
        # one sum.
        if gradient_sum.fired == 0 and model.get_parameter(name).requires_grad:
            raise RuntimeError(
                f"the gradient of {name} was not summed over tensor parallel ranks: its hook did "
                "not fire"
            )
    for gradient_sum in sums.values():  # a layer's parameters may share one
        gradient_sum.fired = 0


@torch.no_grad()
def check_replicas(model: nn.Module, topology: Topology, step: int = 0) -> None:
    """Check that replicated parameters are equal over TP: bit for bit on the CPU, else within
    ACCELERATOR_TOLERANCE.

    One all-reduce a parameter; one synchronisation with the device. Under ZeRO-3 each DP rank
    compares its own partition, which covers the same elements on all TP ranks; partitions on NVMe
    are not compared. For a norm's weight on two ranks:

        rank 0        1.000   0.500        its maximum over ranks     1.000    0.501
        rank 1        1.000   0.501        the maximum of -weight    -1.000   -0.500
                                           their sum, the spread      0.000    0.001

    Raises:
        UserError: on every rank of a TP group that differs, naming the first such parameter.
    """
    if topology.tensor == 1:
        return
    replicas = {
        # `offload_param` keeps partitions in host memory, which NCCL cannot reduce.
        name: partition.to(parameter.device)
        for name, parameter in stored_tensors(model)
        if isinstance(layout_of(parameter), Replicated)
        and (partition := partition_of(parameter, topology.data_rank)).numel() > 0
    }
    spreads = []
    for tensor in replicas.values():
        # The negated copy makes the minimum a maximum: one all-reduce finds both.
        local = tensor.float().flatten()
        extremes = torch.stack((local, -local))
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=topology.tensor_group)
        # A CPU's kernels add in a fixed order, so its replicas stay equal bit for bit.
        tolerance = 0.0 if tensor.device.type == "cpu" else ACCELERATOR_TOLERANCE[tensor.dtype]
        spreads.append(torch.stack(((extremes[0] + extremes[1]).max(), tolerance * extremes.max())))
    for name, (difference, allowed) in zip(replicas, _to_host(spreads), strict=True):
        if not difference <= allowed:  # nan is not
            when = f"after step {step}" if step else "at the start"
            # All ranks of the group have the same extremes, so all raise, and none waits for
            # another.
            raise UserError(
                f"{when} parameter {name} differs between tensor parallel ranks by "
                f"{difference:.3g} (allowed: "
                f"{allowed:.3g}): the replicas have drifted apart and are no longer one model; "
                "resume from an earlier "
                "checkpoint, and report this"
            )


def _to_host(pairs: Sequence[Tensor]) -> list[list[float]]:
    """Copy the pairs to the host, which waits for the device once."""
    values: list[list[float]] = torch.stack(list(pairs)).tolist() if pairs else []
    return values


@contextmanager
def check_expert_choices(model: nn.Module, topology: Topology, step: int) -> Iterator[None]:
    """Check that TP ranks choose the same experts for every token of the forward in this block.

    One all-reduce of 16 bytes a layer; one synchronisation with the device.

    Raises:
        UserError: on every rank of a TP group that differs, naming the first such router.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    if topology.tensor == 1 or not routers:
        yield
        return
    digests: dict[str, Tensor] = {}

    def record(name: str, _: Any, __: Any, output: tuple[Tensor, Tensor]) -> None:
        digests[name] = checksum({"choices": output[1]})

    hooks = [
        module.register_forward_hook(partial(record, name)) for name, module in routers.items()
    ]
    try:
        yield
    finally:
        # Hooks of one forward only: their checksums cost a pass over all choices.
        for hook in hooks:
            hook.remove()
    differing = differ_over(topology.tensor_group, torch.stack(list(digests.values())))
    for name, differs in zip(digests, differing.tolist(), strict=True):
        if differs:
            raise UserError(
                f"in step {step} {name} chose other experts on one tensor parallel rank than on "
                "another: it combined "
                "shards of different experts; resume from an earlier checkpoint, and report this"
            )


@torch.no_grad()
def check_duplicates(zero: ZeroEngine, step: int) -> None:
    """Check, just before the update of `step`, that duplicates on DP ranks are equal bit for bit.

    Duplicates are the weights under ZeRO-0, -1 and -2 (in 16 bits each update replaces them),
    masters and states too under ZeRO-0, and the weights that stay gathered under ZeRO-3. One
    all-gather over the world of 8 bytes a tensor.

    Raises:
        UserError: on every rank of the job. It names a tensor and the ranks that differ from the
            majority of their DP group, of experts' weights of their expert-data group; without a
            majority, the whole group.
    """
    topology = zero.topology
    if topology.data == 1:
        return
    divided = {name for name, tensor in zero.model.named_parameters() if is_divided(tensor)}
    digests = {name: digest(tensor) for name, tensor in zero.replicated_tensors()}
    if not digests:
        return
    # Over the world, so that every rank raises, also in DP groups without a fault.
    gathered = _all_gather_numbers(list(digests.values()), zero.model)
    for name, digest_by_rank in zip(digests, gathered, strict=True):
        is_expert = name in divided
        groups = topology.expert_data_members() if is_expert else topology.data_members()
        for members in groups:
            deviating = _deviating_ranks({rank: digest_by_rank[rank] for rank in members})
            if deviating:
                ranks = name_ranks(deviating)
                differs = f"on {ranks} differs from the other data-parallel ranks"
                if len(deviating) == len(members):
                    differs = f"differs between data-parallel {ranks}"
                raise UserError(
                    f"before the update of step {step} parameter {name} {differs}: memory or a "
                    "message was corrupted; "
                    "resume from an earlier checkpoint, and check the hardware of these ranks"
                )


def check_reproducible(
    run: Callable[[], Tensor], model: nn.Module, streams: Any, step: int
) -> None:
    """Run a micro-batch twice and check that its local gradients are equal bit for bit.

    Neither run changes gradients, weights or random streams.

    Args:
        run: computes the micro-batch's loss, with a graph.

    Raises:
        UserError: on every rank of the job, naming the ranks whose gradients differ, and the first
            parameter.
    """
    named = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    before = streams.state_dict()
    digests = []
    try:
        with deterministic_algorithms():
            for _ in range(2):
                # Both runs draw the same dropout masks.
                streams.load_state_dict(before)
                # Not `backward`, which would accumulate into `.grad` and run DeepSpeed's reduction.
                gradients = torch.autograd.grad(
                    run(), [parameter for _, parameter in named], allow_unused=True
                )
                digests.append(
                    # Digests, so that the first run's gradients are freed before the second.
                    [0 if gradient is None else digest(gradient) for gradient in gradients]
                )
    finally:
        streams.load_state_dict(before)
    pairs = enumerate(zip(*digests, strict=True))
    # Only an index is exchanged, -1 for no difference: a rank's gradients are its own.
    first = next((index for index, (one, other) in pairs if one != other), -1)
    first_by_rank = _all_gather_numbers([first], model)[0]
    deviating = [rank for rank, index in enumerate(first_by_rank) if index >= 0]
    if deviating:
        name = named[first_by_rank[deviating[0]]][0]
        raise UserError(
            f"before step {step} the gradient of {name}, and perhaps others, differs between two "
            "runs of one "
            f"micro-batch on {name_ranks(deviating)}: faulty hardware, or a kernel that adds in no "
            "fixed order; "
            "resume on other hardware, or set zero_tp.training.guard_gradients to false"
        )


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Allow only kernels that add in a fixed order; any other raises a RuntimeError.

    `warn_only=True` would not suffice: flash and memory-efficient attention ignore it in backward.
    cuDNN's backward has no fixed order at all (`attention_backward.cu`, `sdp_utils.cpp`). CUDA
    needs `process.connect.use_deterministic_cublas`.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True)
    try:
        # Without cuDNN's attention, which torch prefers on some devices.
        with sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def digest(tensor: Tensor) -> int:
    """Return 63 bits of a tensor's SHA-256."""
    # 63 bits fit an int64 tensor, by which they are gathered.
    return int.from_bytes(hashlib.sha256(tensor_bytes(tensor)).digest()[:8], "little") >> 1


def _all_gather_numbers(numbers: Sequence[int], model: nn.Module) -> list[list[int]]:
    """Return the values of each number on all ranks of the job, in the order of ranks."""
    own = torch.tensor(
        numbers, dtype=torch.int64, device=next(model.parameters()).device
    ).unsqueeze(0)
    values: list[list[int]] = all_gather(
        own, dist.group.WORLD if dist.is_initialized() else None
    ).T.tolist()
    return values


def _deviating_ranks(digests: dict[int, int]) -> list[int]:
    """Return the ranks whose digest is not the majority's; all ranks if there is no majority.

    Of the digests 7 7 9 the third rank's is odd; of 7 9 and of 7 7 9 9 nobody can say which are
    right.
    """
    if len(set(digests.values())) == 1:
        return []
    usual, count = Counter(digests.values()).most_common(1)[0]
    return [
        rank for rank, number in digests.items() if 2 * count <= len(digests) or number != usual
    ]
