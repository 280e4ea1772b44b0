"""A few random damages of checkpoints, each run others (`python -m tests.fuzz.checkpoints` tries more)."""

from __future__ import annotations

import sys

import pytest

from tests.launched import ROOT, run
from tests.tiers import THOROUGH


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=THOROUGH)])
def test_damage_is_named_or_changes_nothing(seed: int, count: int) -> None:
    """In a process of its own: commands are forked, and this one has threads."""
    words = [sys.executable, "-m", "tests.fuzz.checkpoints", "--count", str(count), "--seed", str(seed)]
    done = run(words, ROOT, limit=60 + 5 * count)
    assert done.returncode == 0, done.stdout + done.stderr
