"""DeepSpeed's compiled ops on CPU ranks: which are not needed, and a build that was killed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed

OTHER_MACHINE_SECONDS = 15 * 60


def without_shared_memory_collectives() -> None:
    """Keep `deepspeed.init_distributed` from compiling and loading its shared-memory collectives.

    Only its inference uses them, and loading them takes a lock file for a moment on every rank at every start: a rank
    killed in that moment would leave all later starts waiting for ever.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _held_files() -> set[str]:
    """Every file that some process of this machine holds open, as far as this user may look."""
    held: set[str] = set()
    for directory in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it ended, or it is another user's
            for entry in directory.iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile; the others still count
                    held.add(os.readlink(entry))
    return held


def abandoned_locks(root: Path, seconds: float = OTHER_MACHINE_SECONDS) -> Iterator[Path]:
    """Lock files of torch's extension builds below `root` that nobody holds.

    torch waits for such a file for ever. A builder keeps it open, so one that no process here has open was left by a
    killed one; where the folder is shared, another machine may hold it, and a build there takes no `seconds`.
    """
    locks = list(root.glob("*/*/lock")) + list(root.glob("*/lock"))
    held = _held_files() if locks else set()
    for lock in locks:
        with contextlib.suppress(FileNotFoundError):  # all ranks start by looking; another one has removed it
            if str(lock.resolve()) not in held and time.time() - lock.stat().st_mtime > seconds:
                yield lock


def clear_abandoned_locks(seconds: float) -> None:
    """Remove what killed builds have left in torch's extension folder."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in abandoned_locks(root, seconds):
        lock.unlink(missing_ok=True)
