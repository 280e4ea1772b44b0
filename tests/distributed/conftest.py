"""Fixtures: `run_seed`, one fresh seed for the proofs of parity; `workplace`, where launched commands run; `own_ranks`,
gloo ranks of one file."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launched import furnish
from tests.pools import Pool


@pytest.fixture(scope="session")
def run_seed() -> int:
    """One fresh seed for all proofs of parity (or ZERO_TP_TEST_SEED), so that the plain runs are computed once."""
    given = os.environ.get("ZERO_TP_TEST_SEED")
    seed = int(given) if given else random.SystemRandom().randrange(10**6)
    print(f"repeat with ZERO_TP_TEST_SEED={seed}")
    return seed


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a prepared corpus and a small config; its runs stay for the tests after."""
    return furnish(tmp_path_factory.mktemp("workplace"))


@pytest.fixture(scope="module")
def own_ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """`WORLD` ranks of a test file, which no other file uses: a simulated accelerator stays registered in a process."""
    pool = Pool(request.module.WORLD)
    yield pool
    pool.kill()
