"""Read the next step's batches while this step trains."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Reads the next step's batches, up to step `last`, in a thread.

    A context manager, whose end is that of the thread.

    The batches of a step depend on its number alone.
    """

    def __init__(self, read: Callable[[int], T], last: int) -> None:
        self._read = read
        self._last = last
        self._thread = ThreadPoolExecutor(1, "read-ahead")
        self._pending: tuple[int, Future[T]] | None = None

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int) -> T:
        """Return the batches of `step`, and start to read the next ones.

        It raises the errors of reading them.
        """
        pending = self._pending
        self._pending = None
        # Another step than the pending one is read at once: the order of steps is the caller's.
        batches = (
            pending[1].result() if pending is not None and pending[0] == step else self._read(step)
        )
        # No step after the last one: its samples would be read in vain, while the run saves and
        # ends.
        if step < self._last:
            self._pending = step + 1, self._thread.submit(self._read, step + 1)
        return batches
