"""A few random inputs of every kind, each run others (`python -m tests.tools.fuzz` tries more)."""

from __future__ import annotations

import sys

import pytest

from tests.launched import ROOT, run
from tests.tiers import in_tiers
from tests.tools.fuzz.__main__ import NAMES

ALL = " ".join(NAMES)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("names", "count"), in_tiers([(ALL, 1), *((name, 12) for name in NAMES)], [(ALL, 1)]))
def test_every_promise_holds(seed: int, names: str, count: int) -> None:
    """In a process of its own: commands are forked, and this one has threads."""
    words = [sys.executable, "-m", "tests.tools.fuzz", *names.split(), "--count", str(count), "--seed", str(seed)]
    done = run(words, ROOT, limit=300)
    assert done.returncode == 0, done.stdout + done.stderr
