"""The mutants of tests/tools/mutants.txt apply to the library; tests/tools/mutations.py shows
that tests catch them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.tools.mutations import TABLE, Mutant, Unfit, check_table, read_table

LINEAR = """
class Linear:  # as it was published
    scale = (1, 2)

    def forward(self, ä):
        if self.bias:
            return (  # the bias comes last
                "ä" + add(ä, self.bias)
            )

def forward(x):
    return add(ä, self.bias)
"""


@pytest.mark.slow
def test_every_mutant_applies() -> None:
    mutants = read_table(TABLE.read_text())
    assert len(mutants) > 40 and all(mutant.tests for mutant in mutants.values())
    check_table(mutants)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "zero_tp/gone.py"}, "No such file"),
        ({"scope": "Transformer.gone"}, "expected one definition of gone, found 0"),
        ({"old": "nowhere()"}, "found it 0 times"),
        ({"old": "make"}, r"found it \d+ times"),
        ({"new": "if"}, "invalid syntax"),
        ({"tests": ["tests/engine/test_engine.py::test_gone[1]"]}, "there is no tests"),
        ({"tests": ["tests/gone.py::test_gone"]}, "there is no tests"),
    ],
)
def test_one_that_does_not_is_named(change: dict[str, object], message: str) -> None:
    mutant = read_table(TABLE.read_text())["final-norm-forgotten"]
    with pytest.raises(Unfit, match=f"broken: .*{message}"):
        check_table({"broken": dataclasses.replace(mutant, **change)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        ("Linear.forward: add(ä, self . bias) => ä", '"ä" + add(ä, self.bias)', '"ä" + ä'),
        (
            r"forward: return add(ä, self.bias) => y = 1\nreturn y",
            "return add(ä, self.bias)\n",
            "y = 1\n    return y\n",
        ),
        ("Linear.scale: (1, 2) => ()", "(1, 2)", "()"),
    ],
)
def test_the_edit_stays_in_its_place(tmp_path: Path, edit: str, before: str, after: str) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    assert LINEAR.count(before) == 1
    mutant = read_table(f"[linear.py]\nname: a fault\n    {edit}\n    tests/a.py::test_b\n")["name"]
    assert mutant == Mutant(
        "linear.py", "a fault", mutant.scope, mutant.old, mutant.new, ["tests/a.py::test_b"]
    )
    assert mutant.apply(tmp_path) == LINEAR.replace(before, after)
