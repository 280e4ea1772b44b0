"""Handle signals.

SIGTERM and Ctrl-C end a process. In training SIGTERM saves and stops, SIGUSR1 saves.

A signal may reach one rank only, or all ranks one after another; it sets flags of that rank. At the
next step boundary all ranks reduce their flags and act together. On an accelerator they act one
step later, so that neither the host nor the device waits for the reduction.

A run starts at step 6, and SIGTERM reaches rank 1 in step 7:

    end of step    flags of ranks 0 and 1    on CPU, both return    on an accelerator
    6              stop 0, 0                 go on                  (nothing yet)
    7              stop 0, 1 → 1             stop after step 7      the flags of step 6: go on
    8                                                               those of step 7: stop after it
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

    from zero_tp.parallel.host_copy import HostCopy


@dataclass
class Requests:
    """Flags of one rank, set by its signal thread.

    Attributes:
        accepted: whether training handles requests at its step boundaries.
        stop, save: what was requested.
        late: whether a reduction's result is read one step later; None: on accelerators only.
    """

    accepted: bool = False
    stop: bool = False
    save: bool = False
    late: bool | None = None
    _exchanges: list[HostCopy] = field(default_factory=list)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Turn signals into requests inside the block."""
        self.accepted = True
        try:
            yield
        finally:
            self.accepted = False
            self._exchanges.clear()

    def all_reduce(self, device: torch.device) -> tuple[bool, bool]:
        """Return (stop, save): whether any rank has the flag.

        All-reduce of two numbers over all ranks.

        A save is returned once. If `late`, each call returns the previous call's result, and the
        first returns (False, False).
        """
        late = device.type != "cpu" if self.late is None else self.late
        save = self.save
        if save:  # reset before the reduction, because another signal may come meanwhile
            self.save = False
        # `stop` is not reset: it is the end of the run.
        self._exchanges.append(_all_reduce_flags([self.stop, save], device))
        # Every rank has called equally often, so all skip the same call.
        if late and len(self._exchanges) == 1:
            return False, False
        stop, saves = self._exchanges.pop(0).read()
        return bool(stop), bool(saves)


def _all_reduce_flags(flags: list[bool], device: torch.device) -> HostCopy:
    """Reduce flags by OR over all ranks. On an accelerator this does not synchronise."""
    import torch
    import torch.distributed as dist

    from zero_tp.parallel.host_copy import HostCopy

    # Page-locked, because a copy from pageable memory to the device is not asynchronous.
    reduced = torch.tensor(flags, dtype=torch.int32, pin_memory=device.type != "cpu").to(
        device, non_blocking=True
    )
    dist.all_reduce(reduced, dist.ReduceOp.MAX)
    return HostCopy(reduced)


def listen(act: Callable[[set[int]], None]) -> None:
    """Call `act` in a thread for SIGINT, SIGTERM and SIGUSR1.

    Forked children get the default actions.

    Python runs no signal handlers while the main thread waits in a collective. A thread that blocks
    the signals and calls `sigwait` would work too, but compilers and data workers would inherit the
    mask.

    Args:
        act: called with the numbers of the signals that have arrived.
    """
    # The handlers do nothing, but without them the default action would end the process. What
    # counts is the byte with the signal's number: Python's C code writes it to the pipe at once,
    # whatever the main thread does.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        # A shell's background jobs ignore SIGINT.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    read_end, write_end = os.pipe()
    # `set_wakeup_fd` requires it: a full pipe must not block a signal handler.
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_restore_handlers)

    def read() -> None:
        while True:
            act(set(os.read(read_end, 64)))

    threading.Thread(target=read, name="signals", daemon=True).start()


def _restore_handlers() -> None:
    """Restore the default actions in a forked child, such as a data worker."""
    # First, because a child shares the pipe: its own signals would reach the thread of its parent.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
