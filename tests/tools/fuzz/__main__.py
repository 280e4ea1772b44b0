"""Random inputs are given to the commands, each kind by a fuzzer of its own, and every promise is held to.

python -m tests.tools.fuzz configs --count 1000

A fuzzer is a module with a function `case(random, directory)`: it makes a random input in an empty directory, tries it
and returns how that ended ("refused", "accepted", …), or raises AssertionError: a promise is broken.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.tools.fuzz.commands import ENVIRONMENT

NAMES = ("configs", "data", "checkpoints", "models", "evaluation_inputs", "inputs")


def fuzz(name: str, numbers: range, seed: int) -> bool:
    """Run cases of a fuzzer, print the broken promises and how many cases ended how → whether every promise held.

    Case k of a seed is the same whatever the other cases are.
    """
    case = importlib.import_module(f"tests.tools.fuzz.{name}").case
    ends = Counter[str]()
    for number in numbers:
        directory = Path(
            tempfile.mkdtemp(prefix="zero_tp-fuzz-")
        )  # no TemporaryDirectory: a fork's end would remove it
        try:
            ends[case(random.Random(f"{seed}/{number}"), directory)] += 1
        except KeyboardInterrupt:
            ends["interrupted"] += 1
            break
        except Exception as error:
            kind = "broken" if isinstance(error, AssertionError) else "failed"  # in the fuzzer; the others go on
            ends[kind] += 1
            what = "" if kind == "broken" else f"{type(error).__name__} in the fuzzer: "
            print(f"{name} --seed {seed} --case {number}: {what}{error}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(f"{name}, seed {seed}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())), flush=True)
    return not ends["broken"] + ends["failed"]


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
    first = arguments.case or 0
    numbers = range(arguments.count) if arguments.case is None else range(first, first + 1)
    seeds = (random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed for _ in NAMES)
    held = [fuzz(name, numbers, seed) for name, seed in zip(arguments.names or NAMES, seeds, strict=False)]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
