"""Signals end a process, or ask something of a running job: SIGTERM to save and stop, SIGUSR1 to save and go on.

A request reaches one rank, or all of them one after another. It only raises that rank's flag; at the next step boundary
all ranks begin one all-reduce, learn of it, and act together: on a CPU at once, on an accelerator one step later, so
that neither the host nor the device waits.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from zero_tp.parallel.deferred import Deferred


@dataclass
class Requests:
    """Requests are the flags of one rank, raised by its signal thread.

    Attributes:
        accepted: whether training listens: flags raised now are acted on at the next step boundary.
        stop, save: what was asked.
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

        Where answers are read late it is what was asked until the call before, on every rank alike; the first call
        returns that nothing was.
        """
        late = device.type != "cpu" if self.late is None else self.late
        self._exchanges.append(_exchange([self.stop, self.save], device))
        self.save = False
        if late and len(self._exchanges) == 1:
            return False, False
        stop, save = self._exchanges.pop(0).read()
        return bool(stop), bool(save)


def _exchange(flags: list[bool], device: torch.device) -> Deferred:
    """Find the flags that any rank has raised. On an accelerator this waits for nothing. All-reduce over all ranks."""
    import torch
    import torch.distributed as dist

    from zero_tp.parallel.deferred import Deferred

    asked = torch.tensor(flags, dtype=torch.int32, pin_memory=device.type != "cpu").to(device, non_blocking=True)
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return Deferred(asked)


def listen(act: Callable[[set[int]], None]) -> None:
    """Call `act` in a thread with the numbers of the SIGINT, SIGTERM and SIGUSR1 that have come.

    Python's own handlers don't run while the main thread waits in a collective. The C-level handler writes the signal's
    number into a pipe, whatever the main thread does. Blocking the signals for a `sigwait` thread would do too, but
    compilers and data workers would inherit the mask.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_take_back)

    def read() -> None:
        while True:
            numbers = os.read(read_end, 64)
            if signal.SIGTERM in numbers:
                # After Ctrl-C the launcher's SIGTERM can overtake our own SIGINT by a moment.
                time.sleep(0.2)
                if select.select([read_end], [], [], 0)[0]:
                    numbers += os.read(read_end, 64)
            act(set(numbers))

    threading.Thread(target=read, name="signals", daemon=True).start()


def _take_back() -> None:
    """Give a forked child (a data worker) its own signals back: it must not report them as its parent's."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
