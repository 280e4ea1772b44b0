"""What a person asks of a running job by signals: save and stop (SIGTERM), save and go on (SIGUSR1).

A signal reaches one rank, or all of them one after another. It only raises that rank's flag; at the next step boundary
all ranks learn of it by one all-reduce, and act together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class Requests:
    """The flags of one rank, raised by its signal thread.

    Attributes:
        accepted: whether training listens: flags raised now are acted on at the next step boundary.
        stop, save: what was asked.
    """

    accepted: bool = False
    stop: bool = False
    save: bool = False

    def agreed(self, device: torch.device) -> tuple[bool, bool]:
        """(stop, save) as any rank was asked; a save that was asked for is asked once. All-reduce of two numbers over
        all ranks."""
        import torch
        import torch.distributed as dist

        flags = torch.tensor([self.stop, self.save], dtype=torch.int32, device=device)
        self.save = False
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        stop, save = flags.tolist()
        return bool(stop), bool(save)


@contextmanager
def accepting(requests: Requests) -> Iterator[None]:
    """Training listens inside: signals become requests."""
    requests.accepted = True
    try:
        yield
    finally:
        requests.accepted = False
