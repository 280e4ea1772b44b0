"""The library keeps the field's names, one class for each class name, short functions and short
sentences.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
VAGUE = {
    *(
        "alike",
        "anew",
        "arrives",
        "at",
        "begun",
        "beside",
        "each",
        "found",
        "given",
        "heard",
        "held",
        "hushed",
        "kept",
    ),
    *(
        "looked",
        "made",
        "octets",
        "remade",
        "settled",
        "straddling",
        "studied",
        "subject",
        "taken",
        "tell",
    ),
    *("told", "whoever"),
}
"""Words that no one would search for. An identifier is split at underscores and capitals."""
ALLOWED = {
    "held_out": "the field's term for data that is not trained on",
    "kept": "the documents that remain, a field of report.json",
}
"""Identifiers with such a word, and why. At most 10."""
FUNCTION_LINES, SENTENCE_WORDS = 64, 40
PRINTERS = {
    "zero_tp/base/errors.py": "`show` itself",
    "zero_tp/commands/path.py": "a shell reads the path, byte for byte",
    "zero_tp/commands/schema.py": "JSON, whose writer escapes",
}
"""Modules that may call `print`, and why."""


@cache
def library() -> dict[str, list[ast.AST]]:
    """Return all nodes of each file of the library."""
    return {
        str(path.relative_to(ROOT)): [*ast.walk(ast.parse(path.read_text()))]
        for path in sorted((ROOT / "zero_tp").rglob("*.py"))
    }


def identifiers(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the classes, functions, arguments and variables that a module
    defines.
    """
    for node in nodes:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id


def definitions(node: ast.stmt) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of what a statement of a module defines."""
    match node:
        case ast.ClassDef() | ast.FunctionDef():
            yield node.lineno, node.name
        case ast.Assign():
            for target in node.targets:
                yield from (
                    (name.lineno, name.id)
                    for name in ast.walk(target)
                    if isinstance(name, ast.Name)
                )


def words_of(name: str) -> list[str]:
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())


def sentences_of(text: str) -> Iterator[str]:
    """Yield a text's sentences; tables, pictures, code and indented blocks are none."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = "\n".join(line for line in text.splitlines() if not re.match(r"\s*\||    |#|!\[", line))
    for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*- ", prose):
        yield " ".join(sentence.split())


def docstrings(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def test_names_are_words_that_someone_would_search_for() -> None:
    assert len(ALLOWED) <= 10
    vague = [
        f"{path}:{line} {name}"
        for path, nodes in library().items()
        for line, name in identifiers(nodes)
        if name.strip("_") not in ALLOWED and VAGUE.intersection(words_of(name))
    ]
    assert not vague, "\n".join(vague)


def test_helpers_of_tests_have_such_names_too() -> None:
    """Their functions, classes and constants; `tests/support/` is read by every author of a
    test.
    """
    vague = [
        f"{path.name}:{line} {name}"
        for path in sorted((ROOT / "tests" / "support").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        for line, name in definitions(node)
        if name not in ALLOWED and VAGUE.intersection(words_of(name))
    ]
    assert not vague, "\n".join(vague)


def test_a_class_name_means_one_class() -> None:
    names = Counter(
        node.name
        for nodes in library().values()
        for node in nodes
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]


def test_what_is_printed_cannot_act_on_a_terminal() -> None:
    """Names of files, models and corpora hold whatever their users put there."""
    calls = [
        f"{path}:{node.lineno}: print(…) instead of show(…)"
        for path, nodes in library().items()
        for node in nodes
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and path not in PRINTERS
    ]
    assert not calls, "\n".join(calls)


def test_functions_are_short() -> None:
    """Without their docstrings."""
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, nodes in library().items()
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and code_lines(node) > FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = (node.end_lineno or 0) - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return lines
    return lines - ((first.end_lineno or 0) - first.lineno + 1)


@pytest.mark.parametrize("kind", ["docstrings", "docs"])
def test_sentences_are_short(kind: str) -> None:
    if kind == "docstrings":
        texts = [(path, text) for path, nodes in library().items() for text in docstrings(nodes)]
    else:
        pages = [
            ROOT / "README.md",
            ROOT / "CONTRIBUTING.md",
            *sorted((ROOT / "docs").rglob("*.md")),
        ]
        texts = [(page.name, page.read_text()) for page in pages if page.name != "config.md"]
    long = [
        f"{path}: {sentence}"
        for path, text in texts
        for sentence in sentences_of(text)
        if len(sentence.split()) > SENTENCE_WORDS
    ]
    assert not long, "\n".join(long)
