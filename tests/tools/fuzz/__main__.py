"""Run commands on random inputs and check what every command promises.

python -m tests.tools.fuzz configs --count 1000

Each kind of input has a fuzzer: a module with a function `case(random, directory)`. It makes a
random input in an empty directory, tries it and returns the result ("refused", "accepted", …).
AssertionError: a promise is broken.
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

IMPORTED = (
    *(
        "tests.support.preloaded",
        "transformers.models.auto.modeling_auto",
        "zero_tp.run.checkpoint.inspect",
    ),
    *("zero_tp.run.loop", "zero_tp.run.start", "zero_tp.tools.evaluation.zero_shot"),
)
"""What the commands need is imported before they are forked."""
NAMES = ("configs", "data", "checkpoints", "models", "evaluation_inputs", "inputs")


def fuzz(name: str, numbers: range, seed: int) -> bool:
    """Run cases of a fuzzer, print broken promises and the count of each result → whether no
    promise was broken.

    Case k of a seed does not depend on the other cases.
    """
    case = importlib.import_module(f"tests.tools.fuzz.{name}").case
    results = Counter[str]()
    for number in numbers:
        # No TemporaryDirectory: a fork's end would remove it.
        directory = Path(tempfile.mkdtemp(prefix="zero_tp-fuzz-"))
        try:
            results[case(random.Random(f"{seed}/{number}"), directory)] += 1
        except KeyboardInterrupt:
            results["interrupted"] += 1
            break
        except Exception as error:
            # In the fuzzer; the others go on.
            kind = "broken" if isinstance(error, AssertionError) else "failed"
            results[kind] += 1
            what = "" if kind == "broken" else f"{type(error).__name__} in the fuzzer: "
            print(f"{name} --seed {seed} --case {number}: {what}{error}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    print(
        f"{name}, seed {seed}: "
        + ", ".join(f"{count} {result}" for result, count in sorted(results.items())),
        flush=True,
    )
    return not results["broken"] + results["failed"]


def main() -> int:
    """Run the command line: 0 when no promise was broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; by default all of them"
    )
    parser.add_argument("--count", type=int, default=100, help="cases of each (default 100)")
    parser.add_argument("--seed", type=int, help="of all cases; by default a fresh one")
    parser.add_argument("--case", type=int, help="run this case of the seed alone")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(NAMES)):
        parser.error(f"no fuzzer {unknown[0]}")
    os.environ.update(ENVIRONMENT)  # libraries read it when they are imported
    for module in IMPORTED:
        importlib.import_module(module)
    first = arguments.case or 0
    numbers = range(arguments.count) if arguments.case is None else range(first, first + 1)
    seeds = (
        random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
        for _ in NAMES
    )
    passed = [
        fuzz(name, numbers, seed)
        for name, seed in zip(arguments.names or NAMES, seeds, strict=False)
    ]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
