"""Fixture: `run_seed`, one fresh seed for the proofs of parity."""

from __future__ import annotations

import os
import random

import pytest


@pytest.fixture(scope="session")
def run_seed() -> int:
    """One fresh seed for all proofs of parity (or ZERO_TP_TEST_SEED), so that the plain runs are computed once."""
    given = os.environ.get("ZERO_TP_TEST_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(10**6)
    print(f"repeat with ZERO_TP_TEST_SEED={seed}")
    return seed
