"""Every process collects the same tests: pytest-xdist's workers have to, and a failed test is
run again by its id.
"""

from __future__ import annotations

import os
import re
import sys

import pytest

from tests.conftest import COLLECTED
from tests.support.launched import run
from tests.tiers import THOROUGH

# An address, a time of day, control characters (of bytes).
PASSING = re.compile(r"0x[0-9a-f]{6}|\d\d:\d\d:\d\d|\\x[01][0-9a-f]|[\x00-\x1f]")


@THOROUGH
def test_another_process_later_collects_the_same(request: pytest.FixtureRequest) -> None:
    """It starts seconds after this one collected, and orders sets otherwise."""
    config = request.config
    here = request.session.stash[COLLECTED]
    other_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    # -m and -k: the session may have selected, which happens after the collection that is compared.
    words = [
        "--collect-only",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(config.rootpath),
    ]
    variables = {"PYTHONHASHSEED": other_seed, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", *words, *config.args]
    done = run(command, config.invocation_params.dir, limit=600, variables=variables)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "::" in line] == here


def test_ids_hold_nothing_that_passes(request: pytest.FixtureRequest) -> None:
    assert not [name for name in request.session.stash[COLLECTED] if PASSING.search(name)]
