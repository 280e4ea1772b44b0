"""Tensor parallel ranks that generate together draw the same numbers, and check that their tokens are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size


def agree_on_tokens(tokens: Tensor, group: Group) -> bool:
    """Return whether all ranks of the group hold the same tokens. All-gather of one number."""
    if group_size(group) == 1:
        return True
    digest = hashlib.sha256(repr(tuple(tokens.shape)).encode() + tokens.detach().cpu().contiguous().numpy().tobytes())
    number = torch.tensor([int.from_bytes(digest.digest()[:7], "little")], device=tokens.device)
    return bool((all_gather(number, group) == number).all())


def _from_first(state: Tensor, group: Group, device: torch.device) -> Tensor:
    shared = state.to(device, copy=True)  # the broadcast writes into it
    dist.broadcast(shared, group_src=0, group=group)
    return shared.cpu()


@contextmanager
def random_numbers_of_first(group: Group, device: torch.device) -> Iterator[None]:
    """Let torch's default generators draw on every rank what they would on the group's first rank.

    Afterwards those of the first rank have gone on, the others' are as they were. Broadcast of the generators' states.
    """
    if group_size(group) == 1:
        yield
        return
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = [generator.get_state() for generator in generators]
    for generator, state in zip(generators, before, strict=True):
        generator.set_state(_from_first(state, group, device))
    try:
        yield
    finally:
        if group_rank(group) > 0:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
