"""A few random changes of configs, each run others (`python -m tests.fuzz.configs` tries more)."""

from __future__ import annotations

import shutil

import pytest

from tests.fuzz.configs import base, case
from tests.fuzz.fuzzing import fuzz
from tests.tiers import THOROUGH


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=THOROUGH)])
def test_what_is_accepted_is_right(seed: int, count: int) -> None:
    try:
        _, broken = fuzz(case, count, seed)
        assert not broken, "\n".join(broken)
    finally:
        shutil.rmtree(base(), ignore_errors=True)
        base.cache_clear()
