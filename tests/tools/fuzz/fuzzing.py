"""Fuzzers run their cases from one seed, and say how each of them ended."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

Case = Callable[[random.Random, Path], str]
"""Makes a random input in an empty directory and tries it → how that ended ("refused", "accepted", …), for the count.

Raises AssertionError: a promise is broken; says what was changed and what came of it."""


def scratch() -> Path:
    """Make a directory that is there until this process ends, whatever its forks do at their ends."""
    directory, owner = Path(tempfile.mkdtemp(prefix="zero_tp-fuzz-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def in_a_child(work: Callable[[], None]) -> None:
    """Do what starts threads: none may have run in the process that forks commands."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, "the base of all cases could not be made"


def fuzz(case: Case, count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Run `count` cases, or those up to an interrupt → (how many ended how, the broken promises).

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
        except KeyboardInterrupt:
            ends["interrupted"] += 1
            break
        except AssertionError as error:
            ends["broken"] += 1
            broken.append(f"--seed {seed} --case {number}: {error}")
        except Exception as error:  # of the fuzzer itself; the other cases go on
            ends["failed"] += 1
            broken.append(f"--seed {seed} --case {number}: {type(error).__name__} in the fuzzer: {error}")
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    return ends, broken
