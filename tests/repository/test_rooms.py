"""The library's shelves have an order: each imports only those above it, inside functions too,
without a circle.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("base", "parallel", "data", "model", "engine", "run", "tools", "commands")
"""In the order of docs/architecture.md: a shelf imports itself and those before it."""
STARTED = ("__main__", "pretrain", "evaluate")
"""What a person starts: it imports everything, and nothing imports it."""


def shelf(module: str) -> str:
    """The shelf of `zero_tp.…` that a module belongs to."""
    return module.split(".")[1]


@cache
def trees() -> dict[Path, ast.Module]:
    """Every file of the library → its tree."""
    return {path: ast.parse(path.read_text()) for path in (ROOT / "zero_tp").rglob("*.py")}


@cache
def imports(*, types: bool = True) -> dict[str, frozenset[str]]:
    """Every module of the library → the modules of the library that it imports, anywhere in its
    file.

    Args:
        types: those that only a type checker imports, too.
    """
    files = {path.relative_to(ROOT).with_suffix(""): path for path in trees()}
    names = {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}
    del names["zero_tp"]  # the public names, which import their modules on first use
    found = {}
    for name, file in names.items():
        targets: set[str] = set()
        statements = [
            node
            for node in trees()[file].body
            if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ]
        for node in chain.from_iterable(map(ast.walk, statements)):
            if isinstance(node, ast.Import):
                targets |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                assert node.level == 0, f"{file}: relative imports hide where they lead"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                targets |= {target if target in names else node.module for target in inside}
        found[name] = frozenset(target for target in targets if target in names and target != name)
    return found


def allowed(importer: str, imported: str) -> bool:
    """Whether the module `importer` may import the module `imported`."""
    ours, theirs = shelf(importer), shelf(imported)
    if ours in STARTED:
        return True
    if ours == theirs == "tools":
        return importer.split(".")[2:3] == imported.split(".")[2:3]
    return theirs in SHELVES and SHELVES.index(theirs) <= SHELVES.index(ours)


def test_every_module_stands_on_a_shelf() -> None:
    assert {shelf(module) for module in imports()} == {*SHELVES, *STARTED}


def test_imports_point_to_earlier_shelves_and_tools_do_not_import_each_other() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, targets in sorted(imports().items())
        for target in sorted(targets)
        if not allowed(module, target)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_library_imports_no_benchmark() -> None:
    """A wheel has none."""
    sources = {path: path.read_text() for path in (ROOT / "zero_tp").rglob("*.py")}
    assert not [
        path
        for path, text in sources.items()
        if re.search(r"(import|from) benchmarks|\"benchmarks\.", text)
    ]


def test_no_modules_import_each_other_in_a_circle() -> None:
    """In an order that has each module after what it imports; without one, CycleError names the
    modules of a circle.
    """
    order = list(TopologicalSorter(imports()).static_order())
    place = {module: number for number, module in enumerate(order)}
    assert len(order) > 200
    assert all(
        place[target] < place[module] for module, targets in imports().items() for target in targets
    )


def test_the_loop_reaches_few_files() -> None:
    reached, waiting = set[str](), ["zero_tp.run.loop"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports(types=False)[module]
    files = {module for module in reached if (ROOT / f"{module.replace('.', '/')}.py").is_file()}
    assert len(files) < 15, f"{len(files)} files: {sorted(files)}"
    assert not {shelf(module) for module in files} & {"tools", "commands"}
    assert not any(module.startswith("zero_tp.model.huggingface") for module in reached), (
        "transformers' class takes a second of each rank's start"
    )
