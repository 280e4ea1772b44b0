"""The tests see CUDA devices only where `-m` selects those that need them, and so does all that
they start.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.devices import device_variables
from tests.support.launched import ROOT
from tests.support.pools import Pools
from tests.support.waits import patience
from tests.tiers import THOROUGH

HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
SHOWN = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("", {}, HIDDEN),
        ("", {"CUDA_VISIBLE_DEVICES": "0,1"}, HIDDEN),
        ("tests/cuda -q", {}, HIDDEN),  # setup.cfg leaves them out
        ("-m cuda tests/cuda", {}, SHOWN),
        ("-mcuda", {}, SHOWN),
        ("-x -m 'cuda or thorough' -k loss", {}, SHOWN),
        ("-m ''", {}, SHOWN),  # all tests
        ("-m 'thorough and not heavy'", {}, HIDDEN),
        ("-m '(thorough or hypothesis) and not heavy and not cuda and not nvme'", {}, HIDDEN),
        ("-m cuda -m heavy", {}, HIDDEN),  # the last one counts
        ("", {"PYTEST_ADDOPTS": "-m cuda"}, SHOWN),
        ("-m heavy", {"PYTEST_ADDOPTS": "-m cuda"}, HIDDEN),
        ("-m cuda", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
        ("-c", {"PYTEST_XDIST_WORKER": "gw0", "CUDA_VISIBLE_DEVICES": ""}, {}),
    ],
)
def test_what_is_shown(words: str, variables: dict[str, str], expected: dict[str, str]) -> None:
    assert device_variables(shlex.split(words), variables) == expected


def shown() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_ranks_see_no_device(ranks: Pools) -> None:
    """Whatever the tests' own environment said."""
    assert ranks(2).run(shown) == ["", ""]


@THOROUGH
def test_ranks_of_tests_on_a_host_with_devices_see_none() -> None:
    """With workers of xdist between, too."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "1"]
    done = subprocess.run(
        [*command, f"{Path(__file__)}::{test_ranks_see_no_device.__name__}"],
        cwd=ROOT,
        env={**outside, "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=patience(240),
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
