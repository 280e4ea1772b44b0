"""Work is done in several processes, and what comes of it arrives in order."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from zero_tp.errors import UserError

Item = TypeVar("Item")
Made = TypeVar("Made")
_SET_PDEATHSIG = 1  # prctl(2)
_AHEAD = 3  # items a process that are read and not yet done

_work: Callable[[Any], Any]
"""The work of this worker process. concurrent.futures lets an initializer leave something for later calls nowhere else.
"""


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def in_order(make: Callable[[], Callable[[Item], Made]], items: Iterable[Item], processes: int) -> Iterator[Made]:
    """Yield `make()(item)` for each item, in order; with one process all is done in this one.

    Args:
        make: makes the work in each process; it is pickled, as items and results are.

    Raises:
        UserError: a process was killed.
    """
    if processes <= 1:
        yield from map(make(), items)
        return
    # Forks of a process with threads may hang: tokenizers, torch and pyarrow have some.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_begin, initargs=(make,)) as pool:
        source, pending = iter(items), deque[Future[Made]]()
        try:
            while True:
                pending.extend(pool.submit(_do, item) for item in islice(source, _AHEAD * processes - len(pending)))
                if not pending:
                    return
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares documents was killed, perhaps for want of memory: "
                "start again, with fewer --processes"
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _begin(make: Callable[[], Callable[[Any], Any]]) -> None:
    global _work
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core has a process already
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL)  # where C code holds the interpreter's lock
    _work = make()


def _end_with_the_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _do(item: Any) -> Any:
    return _work(item)
