"""Check that tests notice a broken library. `python -m tests.tools.mutations [NAME …] [--list]`, minutes, on demand.

Each mutant of tests/tools/mutants is put into a copy of the repository, where the tests that it names run. They must
pass without it and fail with it in the test's own call: by an assertion, or by the library's error that the mutant
names. A mutant that hangs or does not even run (a syntax error, a wrong shape) proves nothing.

Exit status: 0 when every mutant was caught, 1 when one survived or proved nothing, 2 when a mutant does not apply or a
test fails without one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.waits import patience
from tests.tools.first_failure import VARIABLE
from tests.tools.mutants import MUTANTS, Mutant, Unfit

REPOSITORY = Path(__file__).resolve().parents[2]
PASSED = "survived"
LIMIT = 300.0  # seconds of an idle machine for one mutant's tests; a pool of ranks gives up after 120

# What pytest.raises and pytest-timeout raise is called Failed.
A_TESTS_OWN = ("AssertionError", "Failed")


@dataclass
class Outcome:
    """`caught` by `test`, with its error in `line`; otherwise `line` says what happened instead."""

    caught: bool
    line: str
    test: str = ""


def copy_of_the_repository(target: Path) -> None:
    """What git has or would take, as it is in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = REPOSITORY / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name)


def environment(copy: Path) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(copy),  # before the installed package, on the ranks too
        "PYTHONDONTWRITEBYTECODE": "1",  # a .pyc file is recognised by size and second
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "ZERO_TP_TEST_SEED": os.environ.get("ZERO_TP_TEST_SEED", "1"),
    }


def run_tests(copy: Path, tests: list[str], limit: float, guard: str = "") -> Outcome:
    """`caught` by the first test that fails, if it does so by an assertion or by the library's error `guard`."""
    file = copy / "first_failure.json"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.tools.first_failure", "-p", "no:cacheprovider"]
    command += ["-m", "not heavy and not cuda and not nvme and not cluster", "--hypothesis-profile", "thorough"]
    with subprocess.Popen(
        [*command, *tests],
        cwd=copy,
        env=environment(copy) | {VARIABLE: str(file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=patience(limit))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # pytest, and what it has started in its own group
            return Outcome(False, f"hung: no end after {limit:.0f} s")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    output = f"pytest ended with {process.returncode}:\n{printed[-2000:]}"
    if not file.exists():
        return Outcome(False, f"proves nothing: {output}")
    report = json.loads(file.read_text())
    file.unlink()
    if not Path(report["library"]).resolve().is_relative_to(copy.resolve()):
        raise Unfit(f"{report['library']} was tested, which is not in {copy}")
    failure = report["failure"]
    if failure is None:
        return Outcome(False, PASSED if process.returncode == 0 else f"proves nothing: {output}")
    line = f"{failure['kind']}: {failure['message']}".splitlines()[0][:200]
    expected = failure["kind"] in A_TESTS_OWN or bool(guard and guard in failure["message"])
    proves = failure["phase"] == "call" and expected
    return Outcome(proves, line if proves else f"proves nothing: {line} (in {failure['phase']})", failure["test"])


def run_mutant(copy: Path, mutant: Mutant) -> Outcome:
    file = copy / mutant.file
    right = file.read_text()
    file.write_text(mutant.apply(copy))
    try:
        return run_tests(copy, list(mutant.tests), LIMIT, mutant.guard)
    finally:
        file.write_text(right)


def check_the_table(names: list[str]) -> None:
    """Check that every mutant applies and that its tests exist.

    Raises:
        Unfit: names the first that does not.
    """
    for name in names:
        mutant = MUTANTS[name]
        try:
            mutant.apply(REPOSITORY)
        except Unfit as error:
            raise Unfit(f"{name}: {error}") from error
        for test in mutant.tests:
            file, _, function = test.partition("[")[0].partition("::")
            if not (REPOSITORY / file).is_file() or f"def {function}(" not in (REPOSITORY / file).read_text():
                raise Unfit(f"{name}: there is no {test}")


def try_all(names: list[str]) -> list[str]:
    """Run them, print the outcome of each, and return those that were not caught."""
    check_the_table(names)
    tests = list(dict.fromkeys(test for name in names for test in MUTANTS[name].tests))
    with tempfile.TemporaryDirectory(prefix="zero_tp_mutations_") as folder:
        copy = Path(folder)
        copy_of_the_repository(copy)
        begin = time.monotonic()
        right = run_tests(copy, tests, 4 * LIMIT)
        if right.line != PASSED:
            raise Unfit(f"{right.test} fails without a mutant: {right.line}")
        print(f"{len(tests)} tests pass without a mutant ({time.monotonic() - begin:.0f} s)", flush=True)
        uncaught = []
        for name in names:
            begin = time.monotonic()
            outcome = run_mutant(copy, MUTANTS[name])
            print(f"{'caught' if outcome.caught else 'NOT CAUGHT'}: {name} ({time.monotonic() - begin:.0f} s)")
            print(f"    {outcome.test}: {outcome.line}" if outcome.caught else f"    {outcome.line}", flush=True)
            if not outcome.caught:
                uncaught.append(name)
    print(f"{len(names) - len(uncaught)} of {len(names)} mutants caught")
    return uncaught


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutants and their faults")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in MUTANTS]
    if unknown:
        parser.error(f"no mutant {unknown[0]!r}; --list prints them")
    names = arguments.names or list(MUTANTS)
    if arguments.list:
        for name in names:
            print(f"{name}: {MUTANTS[name].fault}")
        return 0
    try:
        return 1 if try_all(names) else 0
    except Unfit as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
