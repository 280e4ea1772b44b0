"""Compiles and loads the DeepSpeed ops that a CPU run uses, and prints the paths of the libraries.

They are the shared-memory collectives, and Adam for parameters in place (FusedAdam) and offloaded (DeepSpeedCPUAdam).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from pathlib import Path

BUILDERS = ("ShareMemCommBuilder", "CPUAdamBuilder", "FusedAdamBuilder")

# A build takes a minute or two. torch marks a running one by a file, and waits for ever where a killed one left it.
STALE_SECONDS = 15 * 60


def build(name: str) -> str:
    """Compiles one op if its library isn't there, loads it, and returns the library's path."""
    with contextlib.redirect_stdout(sys.stderr):  # the builders print
        from deepspeed.ops.op_builder import cpu

        return str(getattr(cpu, name)().load().__file__)


def remove_stale_locks() -> None:
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob("**/lock"):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            print(f"removing {lock}, left by a build that was killed", file=sys.stderr)
            lock.unlink(missing_ok=True)


def main() -> None:
    remove_stale_locks()
    # An op has one to three files, so one at a time would leave cores idle.
    with multiprocessing.Pool(min(len(BUILDERS), os.cpu_count() or 1)) as pool:
        for path in pool.imap(build, BUILDERS):
            print(path)


if __name__ == "__main__":
    main()
