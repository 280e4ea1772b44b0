"""How long tests wait for what ought to happen.

A limit ends what hangs and costs nothing when things go well, so that a slow machine is slow and
not red.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

MOST = 10.0


def patience(seconds: float) -> float:
    """Return how long to wait now for what takes less than `seconds` on an idle machine: that
    times its load a core.
    """
    load = max(os.getloadavg()[:2])
    return seconds * min(max(1.0, load / len(os.sched_getaffinity(0))), MOST)


def wait_until(
    happened: Callable[[], object], seconds: float, what: Callable[[], object] | str, pause: float
) -> float:
    """Look every `pause` seconds whether something happened → the seconds it took.

    Raises:
        AssertionError: with `what`, after `seconds` of an idle machine; the load is read anew at
            every look.
    """
    start = time.monotonic()
    while not happened():
        waited = time.monotonic() - start
        assert waited < patience(seconds), what if isinstance(what, str) else what()
        time.sleep(pause)
    return time.monotonic() - start
