"""Of pytest's workers one launches the runs of tests/cuda; the others wait for it and share its
folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.device_runs import launch_once
from tests.support.launched import ROOT
from tests.tiers import THOROUGH

TESTS = """
import time
from pathlib import Path
import pytest
from tests.support.device_runs import launch_once, shared_directory

@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_seed):
    def launch(directory):
        with open(Path({log!r}), "a") as log:
            log.write(f"{{run_seed}}\\n")
        time.sleep(0.5)
        (directory / "trace").write_text(str(run_seed))
    return launch_once(shared_directory(tmp_path_factory, "runs"), launch)

@pytest.mark.parametrize("case", range(6))
def test_case(folder, run_seed, case):
    assert (folder / "trace").read_text() == str(run_seed)
    time.sleep(0.1)
"""
CONFTEST = "from tests.conftest import run_seed  # noqa: F401\n"


def run_workers(directory: Path, workers: int) -> tuple[str, list[str]]:
    """Return pytest's output, and the seed of each launch."""
    log = directory / "launches"
    (directory / "test_cases.py").write_text(TESTS.format(log=str(log)))
    (directory / "conftest.py").write_text(CONFTEST)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment = {**environment, "PYTHONPATH": str(ROOT)}
    environment.pop("ZERO_TP_TEST_SEED", None)
    words = ["-q", "-p", "no:cacheprovider", f"--rootdir={directory}", f"-n{workers}"]
    words += [f"--basetemp={directory / 'temporary'}", str(directory)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout + done.stderr, log.read_text().splitlines()


@THOROUGH
def test_one_worker_launches_for_all(tmp_path: Path) -> None:
    output, launches = run_workers(tmp_path, 3)
    assert "6 passed" in output, output
    assert len(launches) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_who_asks_later_waits_and_shares_the_outcome(tmp_path: Path, fails: bool) -> None:
    directory = tmp_path / "runs"
    launches = []

    def launch(folder: Path) -> None:
        launches.append(folder)
        time.sleep(0.2)
        if fails:
            raise OSError("no memory")
        (folder / "trace").touch()

    def ask(_: int) -> str:
        try:
            return str((launch_once(directory, launch) / "trace").exists())
        except (OSError, AssertionError) as error:
            return type(error).__name__ + " no memory" * ("OSError: no memory" in str(error))

    with ThreadPoolExecutor(3) as executor:
        outcomes = [*executor.map(ask, range(3))]
    assert launches == [directory]
    expected = ["AssertionError no memory", "AssertionError no memory", "OSError"]
    assert sorted(outcomes) == (expected if fails else ["True"] * 3)
