"""Compile DeepSpeed ops for the CPU and print the paths of the libraries.

python launch/compile_ops.py BUILDER…   such as CPUAdamBuilder (DeepSpeedCPUAdam, for offloaded optimizers) or
FusedAdamBuilder (Adam where the config says `"torch_adam": false`).
"""

from __future__ import annotations

import contextlib
import sys


def main() -> None:
    with contextlib.redirect_stdout(sys.stderr):  # the builders print
        from deepspeed.ops.op_builder import cpu

        # One after another, because ninja already compiles the source files of each in parallel.
        modules = [getattr(cpu, name)().load() for name in sys.argv[1:]]
    for module in modules:
        print(module.__file__)


if __name__ == "__main__":
    main()
