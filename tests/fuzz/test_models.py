"""A few random damages of model directories, each run others (`python -m tests.fuzz.models` tries more)."""

from __future__ import annotations

import shutil

import pytest

from tests.fuzz.fuzzing import fuzz
from tests.fuzz.models import base, case
from tests.tiers import THOROUGH


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=THOROUGH)])
def test_a_damaged_model_is_the_whole_one_or_refused(seed: int, count: int) -> None:
    try:
        _, broken = fuzz(case, count, seed)
        assert not broken, "\n".join(broken)
    finally:
        shutil.rmtree(base()[0], ignore_errors=True)
        base.cache_clear()
