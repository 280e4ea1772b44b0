"""A few random inputs of every kind, each run others (`python -m tests.tools.fuzz` tries more)."""

from __future__ import annotations

import sys

import pytest

from tests.support.launched import ROOT, run
from tests.tools.fuzz.__main__ import NAMES


@pytest.mark.timeout(1200)
@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_every_promise_holds(seed: int, name: str) -> None:
    """In a process of its own: commands are forked, and this one has threads."""
    words = [sys.executable, "-m", "tests.tools.fuzz", name, "--count", "12", "--seed", str(seed)]
    done = run(words, ROOT, limit=300)
    assert done.returncode == 0, done.stdout + done.stderr
