"""Compiles and loads the DeepSpeed ops that a CPU run uses, and prints the paths of the libraries.

They are the shared-memory collectives, and Adam for parameters in place (FusedAdam) and offloaded (DeepSpeedCPUAdam).
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
        from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, FusedAdamBuilder, ShareMemCommBuilder
        from torch.utils.cpp_extension import get_default_build_root

        root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        for lock in root.glob("**/lock"):
            if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                print(f"removing {lock}, left by a build that was killed")
                lock.unlink(missing_ok=True)
        modules = [builder().load() for builder in (ShareMemCommBuilder, CPUAdamBuilder, FusedAdamBuilder)]
    for module in modules:
        print(module.__file__)


if __name__ == "__main__":
    main()
