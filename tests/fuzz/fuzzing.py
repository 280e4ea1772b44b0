"""Fuzzers run their cases from one seed, and say how each of them ended."""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Case = Callable[[random.Random, Path], str]
"""Makes a random input in an empty directory and tries it → how that ended ("refused", "accepted", …), for the count.

Raises AssertionError: a promise is broken; says what was changed and what came of it."""


def fuzz(case: Case, count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Run `count` cases → (how many ended how, the broken promises).

    Args:
        seed: case k of it is the same whatever the count.
        only: run this case alone.
    """
    ends: Counter[str] = Counter()
    broken: list[str] = []
    for number in range(count) if only is None else [only]:
        directory = Path(tempfile.mkdtemp(prefix="zero_tp-fuzz-"))
        try:
            ends[case(random.Random(f"{seed}/{number}"), directory)] += 1
        except AssertionError as error:
            ends["broken"] += 1
            broken.append(f"--seed {seed} --case {number}: {error}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return ends, broken


def main(case: Case, description: str) -> int:
    """Run the command line of a fuzzer: 0 when every promise held."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=100, help="cases to run (default 100)")
    parser.add_argument("--seed", type=int, help="of all cases; by default a fresh one")
    parser.add_argument("--case", type=int, help="run this case of the seed alone")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    ends, broken = fuzz(case, arguments.count, seed, arguments.case)
    for line in broken:
        print(line)
    print(f"seed {seed}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    return 1 if broken else 0
