"""A fork of a process kills it where it is stuck: it needs no interpreter's lock, which C code may hold for ever."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterator, Sequence


def kill_if_stuck(due: Callable[[int], bool], descriptors: Sequence[int], seconds: float) -> int:
    """Fork a process that kills this one if it is still there `seconds` after something was due; return its number.

    It ends with this process, and takes Linux 5.3 or newer.

    Args:
        due: tells whether a descriptor that can be read says so.

    Raises:
        AttributeError, OSError: this system has no descriptors of processes.
    """
    process = os.pidfd_open(os.getpid())
    if child := os.fork():
        os.close(process)
        return child
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # Ctrl-C is the process's to act on
        ready: list[int] = []
        while process not in ready and not any(map(due, ready)):
            ready, _, _ = select.select([process, *descriptors], [], [])
        if process not in ready and not select.select([process], [], [], seconds)[0]:
            signal.pidfd_send_signal(process, signal.SIGKILL)
    finally:
        os._exit(0)


@contextlib.contextmanager
def ends_at_signals(seconds: float) -> Iterator[None]:
    """Kill this process if it is still in the block `seconds` after SIGINT or SIGTERM: Python's own handlers wait until
    a library's call returns. Where the system has no descriptors of processes it does nothing."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are its own
    try:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(AttributeError, OSError):
                stack.callback(_end, kill_if_stuck(_asks_to_end, [read_end], seconds))
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(read_end)
        os.close(write_end)


def _asks_to_end(descriptor: int) -> bool:
    return bool({signal.SIGINT, signal.SIGTERM} & set(os.read(descriptor, 64)))


def _end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored
        os.waitpid(child, 0)
