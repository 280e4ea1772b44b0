"""Compile DeepSpeed ops for the CPU and print the paths of the libraries.

python launch/compile_ops.py [--log FILE] BUILDER…   such as CPUAdamBuilder (DeepSpeedCPUAdam, for
offloaded optimizers) or FusedAdamBuilder (Adam where the config says `"torch_adam": false`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from zero_tp.engine.zero.build_lock import report_build_locks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--log", help="file for the messages of builders and compilers, instead of stderr"
    )
    parser.add_argument("builders", nargs="+", metavar="BUILDER")
    arguments = parser.parse_args()
    messages = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    report_build_locks(write=lambda line: messages.write(f"{line}\n"))
    if arguments.log is not None:
        with open(arguments.log, "wb") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
    with contextlib.redirect_stdout(sys.stderr):  # the builders print
        from deepspeed.ops.op_builder import cpu

        # One after another, because ninja already compiles the source files of each in parallel.
        modules = [getattr(cpu, name)().load() for name in arguments.builders]
    for module in modules:
        print(module.__file__)


if __name__ == "__main__":
    main()
