"""Compiles DeepSpeed ops for the CPU and prints the paths of the libraries.

python launch/compile_ops.py BUILDER…   such as ShareMemCommBuilder (the collectives of every CPU run, in shared
memory), CPUAdamBuilder (DeepSpeedCPUAdam, for offloaded optimizers), FusedAdamBuilder (Adam where the config doesn't
say `torch_adam`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

# A build takes a minute or two. torch marks a running one by a file, and waits for ever where a killed one left it.
STALE_SECONDS = 15 * 60


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # the builders print
        from deepspeed.ops.op_builder import cpu
        from torch.utils.cpp_extension import get_default_build_root

        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        for lock in root.glob("**/lock"):
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                print(f"removing {lock}, left by a build that was killed")
                lock.unlink(missing_ok=True)
        # One after another: each has two source files, and ninja compiles those side by side.
        modules = [getattr(cpu, name)().load() for name in sys.argv[1:]]
    for module in modules:
        print(module.__file__)


if __name__ == "__main__":
    main()
