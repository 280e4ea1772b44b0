"""Check that tests notice a broken library. `python -m tests.tools.mutations [NAME …] [--list]`,
minutes, on demand.

Each mutant of tests/tools/mutants.txt replaces one expression or statement inside a named function,
which is found by syntax tree, in a copy of the repository. There its tests must pass without it and
fail with it in the test's own call: by an assertion, or by the library's error that the mutant
names. A mutant that hangs or does not even run (a syntax error, a wrong shape) proves nothing.

Exit status: 0 when every mutant was caught, 1 when one survived or proved nothing, 2 when a mutant
does not apply or a test fails without one.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.support.launched import ROOT, run

TABLE = Path(__file__).with_name("mutants.txt")
PASSED = "survived"
LIMIT = (
    300.0  # seconds of an idle machine for one mutant's tests; a pool of ranks gives up after 120
)
# Failed: what pytest.raises and pytest-timeout raise.
ASSERTS = re.compile(r"(AssertionError|Failed|assert)\b")


class Unfit(Exception):
    """A mutant that does not apply, or tests that fail without one."""


@dataclass
class Mutant:
    """One entry of the table: `scope` is the qualified name of a function, a class or a variable
    of `file`.
    """

    file: str
    fault: str
    scope: str = ""
    old: str = ""
    new: str = ""
    tests: list[str] = field(default_factory=list)
    guard: str = ""

    def apply(self, repository: Path) -> str:
        """Return the source of the mutant's file with the edit.

        Raises:
            Unfit: the file, the name or the fragment is missing, the fragment is ambiguous, or the
                result is not Python.
        """
        try:
            source = (repository / self.file).read_text()
            mutated = _replace(
                source, self._fragment(_definition(_parsed(source), self.scope)), self.new
            )
            compile(mutated, self.file, "exec")
        except (OSError, LookupError, SyntaxError, ValueError) as error:
            raise Unfit(f"{self.file}, {self.scope}: {error}") from error
        return mutated

    def _fragment(self, scope: ast.AST) -> ast.expr | ast.stmt:
        (parsed,) = ast.parse(self.old).body
        fragment = parsed.value if isinstance(parsed, ast.Expr) else parsed
        wanted = ast.dump(fragment)
        nodes = (node for node in ast.walk(scope) if isinstance(node, type(fragment)))
        matches = [node for node in nodes if ast.dump(node) == wanted]
        if len(matches) != 1:
            raise LookupError(
                f"expected this fragment once, found it {len(matches)} times: {self.old}"
            )
        return matches[0]


@functools.cache  # a file has many mutants
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def read_table(text: str) -> dict[str, Mutant]:
    """Return the mutants of a table by name; the table's first lines say its format."""
    mutants: dict[str, Mutant] = {}
    file = name = ""
    for line in text.splitlines():
        if line.startswith("["):
            file = line.strip("[]")
        elif line.startswith("    tests/"):
            mutants[name].tests.append(line.strip())
        elif line.startswith("    guard: "):
            mutants[name].guard = line.partition(": ")[2]
        elif line.startswith("    "):
            mutant = mutants[name]
            mutant.scope, _, edit = line.strip().partition(": ")
            mutant.old, _, new = edit.partition(" => ")
            mutant.new = new.replace(r"\n", "\n")
        elif line and not line.startswith("#"):
            name, _, fault = line.partition(": ")
            mutants[name] = Mutant(file, fault)
    return mutants


def _definition(tree: ast.Module, name: str) -> ast.AST:
    """Return the function, class or assignment with this qualified name."""
    scope: ast.AST = tree
    for part in name.split("."):
        matches = [node for node in getattr(scope, "body", []) if part in _defined_names(node)]
        if len(matches) != 1:
            raise LookupError(f"expected one definition of {part}, found {len(matches)}")
        scope = matches[0]
    return scope


def _defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _replace(source: str, node: ast.expr | ast.stmt, new: str) -> str:
    """Replace the node's source by `new`, whose further lines are indented like the node."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    before = b"".join([*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]])
    after = b"".join([lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]])
    return (before + new.replace("\n", "\n" + " " * node.col_offset).encode() + after).decode()


def check_table(mutants: dict[str, Mutant]) -> None:
    """Check that every mutant applies and that its tests exist.

    Raises:
        Unfit: names the first that does not.
    """
    for name, mutant in mutants.items():
        try:
            mutant.apply(ROOT)
        except Unfit as error:
            raise Unfit(f"{name}: {error}") from error
        for test in mutant.tests:
            file, _, function = test.partition("[")[0].partition("::")
            if not (ROOT / file).is_file() or f"def {function}(" not in (ROOT / file).read_text():
                raise Unfit(f"{name}: there is no {test}")


@dataclass
class Outcome:
    """`caught` by a test's error, which `line` shows; otherwise `line` says what happened
    instead.
    """

    caught: bool
    line: str


def run_tests(copy: Path, tests: list[str], limit: float, guard: str = "") -> Outcome:
    """Run tests up to the first failure; it catches the mutant by an assertion or by the
    library's error `guard`.
    """
    report = copy / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junit-xml={report}",
    ]
    command += [
        "-m",
        "not heavy and not cuda and not nvme and not cluster",
        "--hypothesis-profile",
        "thorough",
    ]
    # A .pyc file is recognised by its size and second only.
    variables = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "ZERO_TP_TEST_SEED": os.environ.get("ZERO_TP_TEST_SEED", "1"),
    }
    try:
        done = run([*command, *tests], copy, limit, copy, variables)
    except subprocess.TimeoutExpired:  # the ranks end with pytest
        return Outcome(False, f"hung: no end after {limit:.0f} s")
    if done.returncode == 0:
        return Outcome(False, PASSED)
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        # Of the test's own call; set-up and tear-down are errors.
        for failure in case.findall("failure"):
            error = _raised(failure.text or "")
            if ASSERTS.match(error) or (guard and guard in error):
                return Outcome(True, f"{case.get('name')}: {error.splitlines()[0][:200]}")
            return Outcome(False, f"proves nothing: {case.get('name')}: {error[:200]}")
    return Outcome(
        False, f"proves nothing: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}"
    )


def _raised(report: str) -> str:
    """Return the error of a failure's report; of a RankError, the rank's own error."""
    lines = [line[8:] for line in report.splitlines() if line.startswith("E       ")]
    # Pytest indents an error like the statement that raised it.
    error = textwrap.dedent("\n".join(lines))
    if error.startswith("tests.support.pools.RankError: rank "):
        trace = error.partition("\n--- printed by rank")[0].rpartition(
            "Traceback (most recent call last):\n"
        )[2]
        error = "\n".join(
            itertools.dropwhile(lambda line: line.startswith(" "), trace.splitlines())
        )
    return error


def copy_repository(target: Path) -> None:
    """Copy what git has or would take, as it is in the working tree."""
    listing = "git ls-files -z --cached --others --exclude-standard"
    # cp names the files that are deleted but not staged
    subprocess.run(
        f"{listing} | xargs -0 cp --parents -P -t {target} 2>/dev/null", cwd=ROOT, shell=True
    )


def try_all(mutants: dict[str, Mutant]) -> int:
    """Run the mutants, print each outcome, and return how many were not caught."""
    check_table(mutants)
    tests = list(dict.fromkeys(test for mutant in mutants.values() for test in mutant.tests))
    uncaught = 0
    with tempfile.TemporaryDirectory(prefix="zero_tp_mutations_") as folder:
        copy = Path(folder)
        copy_repository(copy)
        begin = time.monotonic()
        unchanged = run_tests(copy, tests, 4 * LIMIT)
        if unchanged.line != PASSED:
            raise Unfit(f"a test fails without a mutant: {unchanged.line}")
        print(
            f"{len(tests)} tests pass without a mutant ({time.monotonic() - begin:.0f} s)",
            flush=True,
        )
        for name, mutant in mutants.items():
            begin = time.monotonic()
            source = (copy / mutant.file).read_text()
            (copy / mutant.file).write_text(mutant.apply(copy))
            outcome = run_tests(copy, mutant.tests, LIMIT, mutant.guard)
            (copy / mutant.file).write_text(source)
            print(
                f"{'caught' if outcome.caught else 'NOT CAUGHT'}: {name} "
                f"({time.monotonic() - begin:.0f} s)"
            )
            print(f"    {outcome.line}", flush=True)
            uncaught += not outcome.caught
    print(f"{len(mutants) - uncaught} of {len(mutants)} mutants caught")
    return uncaught


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.mutations", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; all by default")
    parser.add_argument("--list", action="store_true", help="print the mutants and their faults")
    arguments = parser.parse_args()
    mutants = read_table(TABLE.read_text())
    if unknown := [name for name in arguments.names if name not in mutants]:
        parser.error(f"no mutant {unknown[0]!r}; --list prints them")
    chosen = {name: mutants[name] for name in arguments.names or mutants}
    if arguments.list:
        print("\n".join(f"{name}: {mutant.fault}" for name, mutant in chosen.items()))
        return 0
    try:
        return 1 if try_all(chosen) else 0
    except Unfit as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
