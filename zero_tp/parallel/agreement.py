"""Compare and share values between ranks: a run's files and decisions, the tokens and random
numbers of `generate`.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.base.errors import UserError
from zero_tp.parallel.collectives import Group, group_rank, group_size
from zero_tp.parallel.topology import name_ranks

T = TypeVar("T")


def all_gather_object(value: T) -> list[T]:
    """Return every rank's value, by rank; `[value]` without a process group. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def require_same_on_all_ranks(values: Mapping[str, str]) -> None:
    """Check that all ranks have read the same values. Collective: 32 bytes a rank, all values only
    if they differ.

    Args:
        values: this rank's values by name; the name starts the error message of a difference.

    Raises:
        UserError: on every rank, naming the ranks and their hosts.
    """
    own = dict(values)
    # Sorted keys: ranks may have read the same values in another order.
    if (
        len(
            set(
                all_gather_object(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest())
            )
        )
        == 1
    ):
        return
    ranks = all_gather_object((own, socket.gethostname()))
    # A dict as an ordered set, so that every rank reports the same first difference.
    for name in {name: None for values_of_rank, _ in ranks for name in values_of_rank}:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, (values_of_rank, _) in enumerate(ranks):
            ranks_by_value.setdefault(values_of_rank.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            differences = "; ".join(
                f"{value} on {name_ranks(numbers)} "
                f"({', '.join(sorted({ranks[rank][1] for rank in numbers})[:3])})"
                for value, numbers in list(ranks_by_value.items())[:4]
            )
            raise UserError(
                f"{name}: {differences}; put it on storage that all nodes share, or wait until "
                "they all see "
                "the same content"
            )


def on_rank_zero(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result, or raise its error, on every rank. Collective:
    one broadcast.

    Raises:
        UserError: `work` raised it, or an `OSError`.
    """
    result: list[tuple[T | None, UserError | None]] = [(None, None)]
    # An error travels as a value: if rank 0 raised it here, the others would wait in the broadcast.
    if dist.get_rank() == 0:
        try:
            result = [(work(), None)]
        except UserError as error:
            result = [(None, error)]
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""  # a full disk names no file
            problem = f"{place}{error.strerror or error}; check its permissions and the free space"
            result = [(None, UserError(problem))]
    dist.broadcast_object_list(result)
    value, failure = result[0]
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def check_on_all_ranks(check: Callable[[], None]) -> None:
    """Run a check on every rank; raise the `UserError` of the lowest failing rank on all of
    them. Collective.
    """
    # Raised only after the exchange: a rank that left early would leave the others waiting in it.
    own: UserError | None = None
    try:
        check()
    except UserError as error:
        own = error
    for error_of_rank in all_gather_object(own):
        if error_of_rank is not None:
            raise error_of_rank


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor of any dtype."""
    # By way of bytes, because numpy has no bfloat16.
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def checksum(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a checksum of the tensors' names, dtypes, shapes and bytes.

    It is a number of 63 bits, an int64 tensor [0-d] on their device, so the host waits for nothing.
    """
    signature = repr(
        [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    )
    total = int.from_bytes(hashlib.sha256(signature.encode()).digest()[:7], "little")
    sums = []
    for number, tensor in enumerate(tensors.values()):
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        positions = torch.arange(1, content.numel() + 1, device=tensor.device)
        # Each position of each tensor has a different odd factor: changing a byte, or swapping two,
        # changes the sum.
        factors = (positions * 0x1E3779B97F4A7C15 + 2 * number).bitwise_xor(positions >> 7) | 1
        sums.append((content * factors).sum())
    # Halved for `differ_over`, which negates: -2^63 has no positive counterpart in int64, so a
    # difference from it could be missed.
    return (torch.stack(sums).sum() + total) >> 1


def differ_over(group: Group, numbers: Tensor) -> Tensor:
    """Return which integers differ between the group's ranks. [*] → bool [*]; one all-reduce of
    [2, *].
    """
    # The maximum of the negated numbers is the negated minimum: one all-reduce finds both ends.
    extrema = torch.stack((numbers, -numbers))
    dist.all_reduce(extrema, dist.ReduceOp.MAX, group=group)
    return extrema[0] != -extrema[1]


def agree_on_tokens(group: Group, *tokens: Tensor) -> bool:
    """Return whether the token tensors are equal on all ranks of the group. All-reduce of two
    numbers.
    """
    if group_size(group) == 1:
        return True
    return not differ_over(
        group, checksum({str(number): tensor for number, tensor in enumerate(tokens)})
    ).item()


@contextmanager
def broadcast_rng_state(group: Group, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of the group's first rank on every rank. Broadcasts the default
    generators' states.

    The other ranks' generators are restored afterwards.
    """
    if group_size(group) == 1:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, before, strict=True):
        shared = state.to(device, copy=True)  # the broadcast writes into it
        dist.broadcast(shared, group_src=0, group=group)
        generator.set_state(shared.cpu())
    try:
        yield
    finally:
        # The first rank's own generators stay where these draws have moved them, as without TP.
        if group_rank(group) > 0:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
