"""A few random changes of inputs and corpora, each run others (`python -m tests.fuzz.data` tries more)."""

from __future__ import annotations

import shutil

import pytest

from tests.fuzz.data import case, prepared
from tests.fuzz.fuzzing import fuzz
from tests.tiers import THOROUGH


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=THOROUGH)])
def test_what_is_accepted_is_right(seed: int, count: int) -> None:
    try:
        _, broken = fuzz(case, count, seed)
        assert not broken, "\n".join(broken)
    finally:
        shutil.rmtree(prepared()[0], ignore_errors=True)
        prepared.cache_clear()
