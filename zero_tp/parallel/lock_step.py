"""Let ranks run different numbers of forwards, each of which is a collective.

A rank that has finished joins the forwards of the others with rows of its own, whose output is
dropped:

    rank 0    forward  forward  joins    joins    ends
    rank 1    forward  forward  forward  forward  ends

Before each forward the ranks add up how many of them need one; ranks end when none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zero_tp.parallel.collectives import Group, all_reduce


@contextmanager
def uneven_forwards(
    model: nn.Module, group: Group, device: torch.device, join: Callable[[], object]
) -> Iterator[None]:
    """Let each rank run as many forwards of `model` as it likes inside this block. Collective: an
    all-reduce of one number before each forward, and at the block's end.

    A rank whose block raises between forwards joins the others', too. If it raises inside a
    forward, the others may wait in one of the forward's collectives: no later one can meet it.

    Args:
        group: the ranks whose forwards are collectives of each other.
        join: runs one forward of `model`.
    """
    is_inside = False

    def ranks_with_forward(own: int) -> Tensor:
        return all_reduce(torch.tensor(own, device=device), group)

    def enter(*_: object) -> None:
        nonlocal is_inside
        ranks_with_forward(1)
        is_inside = True

    def leave(*_: object) -> None:
        nonlocal is_inside
        is_inside = False

    hooks = [
        # First, because DeepSpeed's own hooks of ZeRO-3 are collectives, too.
        model.register_forward_pre_hook(enter, prepend=True),
        model.register_forward_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while not is_inside and ranks_with_forward(0).item():
            join()
