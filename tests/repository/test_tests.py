"""The tests' own order: helpers live in tests/support/, and `--fast` reaches every package of
the library.
"""

from __future__ import annotations

import ast
import importlib
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fast import is_fast

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = sorted(
    path.parent.relative_to(ROOT / "zero_tp")
    for path in (ROOT / "zero_tp").rglob("__init__.py")
    if path.parent.name != "zero_tp"
)


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.slow
def test_no_test_file_is_imported() -> None:
    """A helper of two files stands in tests/support/."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    tests = {module for module in modules if module.rpartition(".")[2].startswith("test_")}
    wrong = {
        f"{path.relative_to(ROOT)} imports {module}"
        for path in files
        for module in imported_modules(path)
        if module in tests
    }
    assert not wrong, "\n".join(sorted(wrong))


def fast_tests(folder: Path) -> Iterator[str]:
    """Yield the fast tests of a folder's own files."""
    for path in sorted(folder.glob("test_*.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        marks = getattr(module, "pytestmark", [])
        for name, value in vars(module).items():
            if not name.startswith("test_") or not isinstance(value, types.FunctionType):
                continue
            own = [
                *(marks if isinstance(marks, list) else [marks]),
                *getattr(value, "pytestmark", []),
            ]
            if not any(
                mark.name in ("thorough", "heavy", "cuda", "slow") for mark in own
            ) and is_fast(value):
                yield f"{path}::{name}"


@pytest.mark.parametrize("package", PACKAGES, ids=str)
def test_each_package_has_a_fast_test(package: Path) -> None:
    """In the mirrored folder; a package's settings are tested with what they set."""
    folder = ROOT / "tests" / (package.parent if package.name == "settings" else package)
    assert next(fast_tests(folder), None), f"{folder}: no test of {package} runs with --fast"
