"""A mutant replaces one expression or statement inside a named function, which it finds by syntax tree.

Comments, formatting and all code outside the function can change; the mutant still applies.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


class Unfit(Exception):
    """A mutant that does not apply, or tests that fail without one."""


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        fault: the silent failure, in a sentence.
        place: `FILE::NAME`; the qualified name of a function, a class or a variable of the file.
        old: an expression or a statement that occurs exactly once there.
        new: the code that takes its place; `pass` removes a statement.
        tests: pytest node ids; at least one must fail.
        guard: words of the library's own error, if a check of the library stops this mutant.
    """

    fault: str
    place: str
    old: str
    new: str
    tests: tuple[str, ...]
    guard: str = ""

    @property
    def file(self) -> str:
        return self.place.partition("::")[0]

    def apply(self, repository: Path) -> str:
        """Return the source of the mutant's file with the edit.

        Raises:
            Unfit: the file, the name or the fragment is missing, the fragment is ambiguous, or the result is not
                Python.
        """
        try:
            source = (repository / self.file).read_text()
            scope = _definition(ast.parse(source), self.place.partition("::")[2])
            node = self._fragment(scope)
            mutated = _replace(source, node, self.new)
            compile(mutated, self.file, "exec")
        except (OSError, LookupError, SyntaxError, ValueError) as error:
            raise Unfit(f"{self.place}: {error}") from error
        return mutated

    def _fragment(self, scope: ast.AST) -> ast.expr | ast.stmt:
        (parsed,) = ast.parse(self.old).body
        wanted = ast.dump(parsed.value if isinstance(parsed, ast.Expr) else parsed)
        matches = [
            node for node in ast.walk(scope) if isinstance(node, ast.expr | ast.stmt) and ast.dump(node) == wanted
        ]
        if len(matches) != 1:
            raise LookupError(f"expected this fragment once, found it {len(matches)} times: {self.old}")
        return matches[0]


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
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _replace(source: str, node: ast.expr | ast.stmt, new: str) -> str:
    """Put `new` in the place of the node, its further lines indented like the node."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    before = b"".join([*lines[: node.lineno - 1], lines[node.lineno - 1][: node.col_offset]])
    after = b"".join([lines[node.end_lineno - 1][node.end_col_offset :], *lines[node.end_lineno :]])
    return (before + new.replace("\n", "\n" + " " * node.col_offset).encode() + after).decode()
