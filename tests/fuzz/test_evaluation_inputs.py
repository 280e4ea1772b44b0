"""A few random inputs of evaluation, each run others (`python -m tests.fuzz.evaluation_inputs` tries more)."""

from __future__ import annotations

import shutil

import pytest

from tests.fuzz import models
from tests.fuzz.evaluation_inputs import case, whole
from tests.fuzz.fuzzing import fuzz
from tests.tiers import THOROUGH


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=THOROUGH)])
def test_an_odd_input_is_one_line(seed: int, count: int) -> None:
    try:
        _, broken = fuzz(case, count, seed)
        assert not broken, "\n".join(broken)
    finally:
        shutil.rmtree(models.base()[0], ignore_errors=True)
        models.base.cache_clear()
        whole.cache_clear()
