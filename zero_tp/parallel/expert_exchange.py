"""Send the rows of tokens to the ranks that hold their experts, and the experts' outputs back.

Each expert rank has an E-th of the experts (parallel/layout.py) and tokens of its own. With E 2,
4 experts and 3 rows a rank, sorted by expert:

    expert rank    rows of experts    sends                  has after `start_dispatch`
    0              0 1 2              0 1 → 0    2 → 1       0 0 1      of ranks 0 1 0
    1              0 3 3              0 → 0      3 3 → 1     2 3 3      of ranks 0 1 1

No row is dropped, so the numbers of rows differ between ranks and steps, and may be 0. `combine`
is the inverse. Every rank of the group takes part in each exchange, also one without rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from zero_tp.parallel.collectives import Group, Pending, group_size
from zero_tp.parallel.host_copy import HostCopy


class PendingRows(Pending):
    """Rows on their way over an expert group.

    Attributes:
        exchange_group: the expert group; a report of a hang names it.
    """

    def __init__(
        self,
        rows: Tensor,
        work: Work | None,
        finish: Callable[[Tensor], Tensor] | None,
        exchange_group: Group,
    ):
        super().__init__(rows, work, finish)
        self.exchange_group = exchange_group


class ExpertExchange(ABC):
    """The way of a layer's rows to their experts and back.

    Attributes:
        is_remote: other ranks have some of the experts.
        ends: where the rows of each expert of this rank end in the dispatched rows, int32 [experts
            of this rank].
    """

    is_remote: ClassVar[bool]
    ends: Tensor

    @abstractmethod
    def start_dispatch(self, rows: Tensor) -> Pending:
        """Send rows, sorted by all experts, to their experts. [n·k, i] → [rows of this rank's
        experts, i], sorted by expert, and of one expert by the rank that sent them.
        """

    @abstractmethod
    def start_combine(self, rows: Tensor) -> Pending:
        """Send the rows of this rank's experts back to where `start_dispatch` took them from."""


class LocalExperts(ExpertExchange):
    """All experts are on this rank: its rows stay where they are.

    Args:
        ends: where the rows of each of all experts end in this rank's sorted rows, int32 [E].
    """

    is_remote = False

    def __init__(self, ends: Tensor, group: Group = None):
        self.ends = ends

    def start_dispatch(self, rows: Tensor) -> Pending:
        return Pending(rows)

    def start_combine(self, rows: Tensor) -> Pending:
        return Pending(rows)


class AllToAllExperts(ExpertExchange):
    """Experts divided over a group of ranks, which exchange rows by all-to-alls of variable size.

    One small all-to-all gives the sizes; the host waits for them once, before the first rows.

    Args:
        ends: as of `LocalExperts`.
        group: the expert group.

    Attributes:
        exchange_group: the expert group; a report of a hang names it.
    """

    is_remote = True

    def __init__(self, ends: Tensor, group: Group = None):
        self.exchange_group = group
        sizes = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64))
        sent = sizes.view(group_size(group), -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        # [expert ranks, experts of this rank], of the rows that come from each rank.
        self._received = received
        self._splits = HostCopy(torch.stack((sent.sum(1), received.sum(1))))
        # F.grouped_mm takes ends in int32 only.
        self.ends = received.sum(0).cumsum(0, dtype=torch.int32)

    def start_dispatch(self, rows: Tensor) -> Pending:
        sent, received = self.splits
        return self._exchange(rows, sent, received, lambda arrived: arrived[self.order[0]])

    def start_combine(self, rows: Tensor) -> Pending:
        sent, received = self.splits
        return self._exchange(rows[self.order[1]], received, sent, None)

    @cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """Return how many rows this rank sends to each rank of the group, and gets from each. The
        host waits for the sizes.
        """
        sent, received = self._splits.read()
        return sent, received

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """Return the order that sorts rows, as they arrive, by expert, and its inverse.

        Rows arrive by rank, and from each rank by expert.
        """
        ranks, experts = self._received.shape
        expert = torch.arange(experts, device=self._received.device).repeat(ranks)
        total = sum(self.splits[1])
        arrived = expert.repeat_interleave(self._received.flatten(), output_size=total)
        # Stable, so that an expert's rows have one order in every run: sums then do, too.
        order = arrived.argsort(stable=True)
        return order, order.argsort()

    def _exchange(
        self,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        finish: Callable[[Tensor], Tensor] | None,
    ) -> Pending:
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        work = dist.all_to_all_single(
            arrived, rows.contiguous(), received, sent, group=self.exchange_group, async_op=True
        )
        return PendingRows(arrived, work, finish, self.exchange_group)
