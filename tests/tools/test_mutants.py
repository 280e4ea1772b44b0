"""The mutants of tests/tools/mutants apply to the library; tests/tools/mutations.py shows that tests catch them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.tools import mutations
from tests.tools.mutants import MUTANTS, Mutant

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


def test_every_mutant_applies() -> None:
    mutations.check_the_table(list(MUTANTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"place": "zero_tp/gone.py::Transformer"}, "No such file"),
        ({"place": "zero_tp/models/transformer.py::Gone.forward"}, "expected one definition of Gone, found 0"),
        ({"place": "zero_tp/models/transformer.py::Transformer.gone"}, "expected one definition of gone, found 0"),
        ({"old": "nowhere()"}, "found it 0 times"),
        ({"old": "make"}, r"found it \d+ times"),
        ({"new": "if"}, "invalid syntax"),
        ({"tests": ("tests/training/test_engine.py::test_gone[1]",)}, "there is no tests"),
        ({"tests": ("tests/gone.py::test_gone",)}, "there is no tests"),
    ],
)
def test_one_that_does_not_is_named(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str) -> None:
    broken = dataclasses.replace(MUTANTS["final-norm-forgotten"], **change)  # type: ignore[arg-type]
    monkeypatch.setattr(mutations, "MUTANTS", {"broken": broken})
    with pytest.raises(mutations.Unfit, match=f"broken: .*{message}"):
        mutations.check_the_table(["broken"])


@pytest.mark.parametrize(
    ("place", "old", "new", "before", "after"),
    [
        ("Linear.forward", "add(ä, self . bias)", "ä", '"ä" + add(ä, self.bias)', '"ä" + ä'),
        (
            "forward",
            "return add(ä, self.bias)",
            "y = 1\nreturn y",
            "return add(ä, self.bias)\n",
            "y = 1\n    return y\n",
        ),
        ("Linear.scale", "(1, 2)", "()", "(1, 2)", "()"),
    ],
)
def test_the_edit_stays_in_its_place(tmp_path: Path, place: str, old: str, new: str, before: str, after: str) -> None:
    (tmp_path / "linear.py").write_text(LINEAR)
    assert LINEAR.count(before) == 1
    assert Mutant("", f"linear.py::{place}", old, new, ()).apply(tmp_path) == LINEAR.replace(before, after)
