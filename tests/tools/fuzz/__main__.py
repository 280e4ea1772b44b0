"""Random inputs are given to the commands, each kind by a fuzzer of its own, and every promise is held to.

python -m tests.tools.fuzz configs --count 1000
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys

from tests.tools.fuzz.commands import ENVIRONMENT
from tests.tools.fuzz.fuzzing import fuzz

NAMES = ("configs", "data", "checkpoints", "models", "evaluation_inputs", "inputs")


def main() -> int:
    """Run the command line: 0 when every promise held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; by default all of them")
    parser.add_argument("--count", type=int, default=100, help="cases of each (default 100)")
    parser.add_argument("--seed", type=int, help="of all cases; by default a fresh one")
    parser.add_argument("--case", type=int, help="run this case of the seed alone")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no fuzzer {unknown[0]}")
    os.environ.update(ENVIRONMENT)  # libraries read it when they are imported
    # What the commands import is there before they are forked.
    for module in ("tests.support.preloaded", "zero_tp.training.loop", "zero_tp.evaluation.zero_shot"):
        importlib.import_module(module)
    failed = False
    for name in arguments.names or NAMES:
        seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
        case = importlib.import_module(f"tests.tools.fuzz.{name}").case
        ends, broken = fuzz(case, arguments.count, seed, arguments.case)
        for line in broken:
            print(f"{name} {line}")
        print(f"{name}, seed {seed}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())), flush=True)
        failed |= bool(broken)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
