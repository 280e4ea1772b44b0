"""Signals end a process, or request something of a training run: SIGTERM to save and stop, SIGUSR1 to save.

A request reaches one rank, or all of them one after another, and only sets that rank's flags. At the next step boundary
all ranks reduce the flags and act together: on a CPU at once, on an accelerator one step later. Then neither the host
nor the device waits.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zero_tp.parallel.deferred import Deferred


@dataclass
class Requests:
    """Flags of one rank, set by its signal thread.

    Attributes:
        accepted: whether training handles requests at its step boundaries.
        stop, save: what was requested.
        late: whether an answer is read a step later; by default on an accelerator.
    """

    accepted: bool = False
    stop: bool = False
    save: bool = False
    late: bool | None = None
    _exchanges: list[Deferred] = field(default_factory=list)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Turn signals into requests inside the block."""
        self.accepted = True
        try:
            yield
        finally:
            self.accepted = False
            self._exchanges.clear()

    def agreed(self, device: torch.device) -> tuple[bool, bool]:
        """Return (stop, save) as any rank was asked; a save is returned once. All-reduce of two numbers, all ranks.

        Late answers are those of the call before, on every rank; the first call then returns (False, False).
        """
        late = device.type != "cpu" if self.late is None else self.late
        save = self.save
        if save:  # before the reduction, during which another request may come
            self.save = False
        self._exchanges.append(_all_reduce_flags([self.stop, save], device))
        if late and len(self._exchanges) == 1:
            return False, False
        stop, saves = self._exchanges.pop(0).read()
        return bool(stop), bool(saves)


def _all_reduce_flags(flags: list[bool], device: torch.device) -> Deferred:
    """Reduce flags by OR over all ranks. On an accelerator this waits for nothing."""
    import torch
    import torch.distributed as dist

    from zero_tp.parallel.deferred import Deferred

    reduced = torch.tensor(flags, dtype=torch.int32, pin_memory=device.type != "cpu").to(device, non_blocking=True)
    dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return Deferred(reduced)


def listen(act: Callable[[set[int]], None]) -> None:
    """Handle SIGINT, SIGTERM and SIGUSR1 by `act` alone, in a thread. A forked child has the default actions.

    Python's own handlers don't run while the main thread waits in a collective. Blocking the signals for a `sigwait`
    thread would work too, but compilers and data workers would inherit the mask.

    Args:
        act: called with the numbers of the signals that have arrived.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, lambda *_: None)
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_restore_handlers)

    def read() -> None:
        while True:
            act(set(os.read(read_end, 64)))

    threading.Thread(target=read, name="signals", daemon=True).start()


def _restore_handlers() -> None:
    """Give a forked child (a data worker) the default actions back."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
