"""Count the elements that process groups send in the collectives that run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_iter

COLLECTIVES = tuple(
    name
    for name in dir(ProcessGroup)
    if name.lstrip("_").startswith(("all", "reduce", "broadcast", "gather", "scatter"))
)
"""Methods of a process group that move data."""


@contextmanager
def counted() -> Iterator[dict[str, float]]:
    """Yield the elements that this rank sends in the block, by collective, counted as for rings of
    N ranks.

    All-gather, reduce-scatter, broadcast and reduce of n elements send n·(N-1)/N, an all-reduce
    twice as many.
    """
    sent: dict[str, float] = {}

    def counting(name: str, method: Any) -> Any:
        def called(group: ProcessGroup, *args: Any, **options: Any) -> Any:
            tensors = [
                [each for each in tree_iter(argument) if isinstance(each, Tensor)]
                for argument in args[:2]
            ]
            elements = max(sum(each.numel() for each in argument) for argument in tensors)
            times = 2 if "allreduce" in name else 1
            size = group.size()
            sent[name] = sent.get(name, 0.0) + times * elements * (size - 1) / size
            return method(group, *args, **options)

        return called

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(
                mock.patch.object(ProcessGroup, name, counting(name, getattr(ProcessGroup, name)))
            )
        yield sent
