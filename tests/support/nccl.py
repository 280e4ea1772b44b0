"""Collectives on the simulated accelerator (tests/support/streams.py), ordered as torch's
ProcessGroupNCCL orders them.

gloo computes them. An asynchronous collective is enqueued on the stream of its group, behind the
work that the current stream has so far. Its output is NaN until it has run, and its tensors are
kept alive until `wait()`, which makes the current stream wait and runs nothing. With
`async_op=False` a collective is enqueued on the current stream (ProcessGroupNCCL::collective of
torch 2.13).

All collectives of a group run in the order in which they were issued, on any stream: NCCL's kernels
wait for the communicator's `deviceStream` (ncclLaunchPrepare). Before one runs, the ranks of the
group compare its name, shapes and dtypes, so that a different order fails on all of them instead of
hanging.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from tests.support.streams import Computing, Stream, Work


class Handle(_distributed_c10d.Work):
    """The work handle that torch returns to the caller of a collective."""

    def __init__(self, wait: Work) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, *_: Any) -> bool:
        self._wait()
        return True


class Group:
    """The collectives of one process group.

    Attributes:
        ranks: global ranks of the members.
        stream: runs the asynchronous collectives.
        issued: this rank's collectives, in order.
        asynchronous: how many of them run on `stream`.
    """

    def __init__(self, group: dist.ProcessGroup, stream: Stream) -> None:
        self.group, self.stream = group, stream
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.issued: list[str] = []
        self.asynchronous = 0
        self._end_of_last: Work = lambda: None

    def enqueue(self, stream: Stream, collective: str, run: Callable[[], Any]) -> Work:
        """Enqueue a collective on a stream, behind the one before it; return the event of its
        end.
        """
        self.issued.append(collective)
        number = len(self.issued)

        def work() -> None:
            with _disable_current_modes():
                collectives = [""] * len(self.ranks)
                dist.all_gather_object(collectives, collective, group=self.group)
                check_same(number, self.ranks, collectives)
                for result in tree_leaves(run()):
                    if not isinstance(result, Tensor):
                        result.wait()  # once: gloo's reduce-scatter moves its result in it

        stream.wait_event(self._end_of_last)
        stream.enqueue(work)
        self._end_of_last = stream.record_event()
        return self._end_of_last


def check_same(number: int, ranks: tuple[int, ...], collectives: list[str]) -> None:
    each = "; ".join(
        f"rank {rank}: {collective}" for rank, collective in zip(ranks, collectives, strict=True)
    )
    assert len(set(collectives)) == 1, (
        f"collective {number} of a group differs between ranks: {each}"
    )


def poison(output: Tensor) -> None:
    with _disable_current_modes():
        output.view(-1).view(torch.uint8).fill_(255)  # NaN in every floating dtype


class Collectives:
    """The collectives of all process groups of a rank."""

    def __init__(self, computing: Computing) -> None:
        self._computing = computing
        self._groups: dict[str, Group] = {}
        self._handle: Handle | None = (
            None  # torch keeps the C++ half alone, until it has returned this one
        )

    def issue(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enqueue a collective of torch.ops.c10d. The first argument of each is its output."""
        computing = self._computing
        named = {argument.name: argument.default_value for argument in function._schema.arguments}
        named |= dict(zip(named, args, strict=False)) | kwargs
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, FakeTensor)]
        assert all(tensor.fake_device.type != "cpu" for tensor in tensors), (
            "NCCL takes no tensors of the host"
        )
        inputs = {
            id(computing.memory(leaf))
            for leaf in tree_leaves(args[1:])
            if isinstance(leaf, FakeTensor)
        }
        for output in tree_leaves(args[0]) if inputs else ():  # the others work in place
            if id(computing.memory(output)) not in inputs:
                computing.current_stream().enqueue(partial(poison, computing.real(output)))
        group = self._group(dist.ProcessGroup.unbox(named["process_group"]))
        collective = (
            f"{function._schema.name} "
            f"{[(list(tensor.shape), str(tensor.dtype)) for tensor in tensors]}"
        )
        run = partial(function, *tree_map(computing.real, args), **kwargs)
        if named["async_op"]:
            self._handle = self._asynchronous(group, collective, run, tensors)
        else:
            group.enqueue(computing.current_stream(), collective, run)
            self._handle = Handle(lambda: None)
        boxed = self._handle.boxed()
        return boxed if len(function._schema.returns) == 1 else (args[0], boxed)

    def _asynchronous(
        self, group: Group, collective: str, run: Callable[[], Any], tensors: Sequence[Tensor]
    ) -> Handle:
        group.asynchronous += 1
        group.stream.wait_stream(self._computing.current_stream())
        stashed = [tensors]  # WorkNCCL's `stashed_for_allocator_safety_`
        end = group.enqueue(group.stream, collective, run)
        group.stream.enqueue(stashed.clear)

        def wait() -> None:
            self._computing.current_stream().wait_event(end)
            stashed.clear()

        return Handle(wait)

    def _group(self, group: dist.ProcessGroup) -> Group:
        if group.group_name not in self._groups:
            self._groups[group.group_name] = Group(group, self._computing.new_stream())
        return self._groups[group.group_name]

    def count(self) -> tuple[int, int]:
        """How many collectives this rank has issued, and how many of them are asynchronous."""
        groups = self._groups.values()
        return sum(len(group.issued) for group in groups), sum(
            group.asynchronous for group in groups
        )

    def end_step(self) -> None:
        """Compare each group's collectives and their order over its ranks, then run what still
        waits.

        Collective over the world.
        """
        mine = {name: (group.ranks, group.issued) for name, group in self._groups.items()}
        of_ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        with _disable_current_modes():
            dist.all_gather_object(of_ranks, mine)
        members = {name: ranks for groups in of_ranks for name, (ranks, _) in groups.items()}
        for name, ranks in members.items():
            issued = [of_ranks[rank].get(name, (ranks, []))[1] for rank in ranks]
            for number, collectives in enumerate(
                itertools.zip_longest(*issued, fillvalue="none"), 1
            ):
                check_same(number, ranks, list(collectives))
        for group in self._groups.values():
            group.stream.synchronize()
        self._computing.default_stream.synchronize()
