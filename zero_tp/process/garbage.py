"""Python collects its garbage between steps, on all ranks at the same ones.

Left to itself each rank collects when its own objects have become many: in the middle of a step, while the others wait
for it, and each of them at another one.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_holders, _was_on = 0, False
"""How many callers hold, and the switch before the first. The module has them, because the switch is the interpreter's,
and the callers, a run and its watch's thread, do not know each other."""


def hold() -> None:
    """Switch automatic collection off, in all threads, until all that hold it have called `release`.

    Nothing is allocated here, which could start a collection.
    """
    global _holders, _was_on
    _lock.acquire()
    if _holders == 0:
        _was_on = gc.isenabled()
        gc.disable()
    _holders += 1
    _lock.release()


def release() -> None:
    """Undo one `hold`: the last one switches automatic collection on again, if it was on."""
    global _holders
    _lock.acquire()
    _holders -= 1
    if _holders == 0 and _was_on:
        gc.enable()
    _lock.release()
