"""The mutants of tests/mutants still fit the code; whether tests catch them takes minutes: tests/mutations.py."""

from __future__ import annotations

import dataclasses

import pytest

from tests import mutations
from tests.mutants import MUTANTS


def test_every_mutant_applies() -> None:
    mutations.check_the_table(list(MUTANTS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "nowhere to be found"}, "occurs 0 times"),
        ({"old": "self"}, r"occurs \d+ times"),
        ({"new": "if"}, "invalid syntax"),
        ({"tests": ("tests/distributed/test_engine.py::test_gone[1]",)}, "there is no tests"),
        ({"tests": ("tests/gone.py::test_gone",)}, "there is no tests"),
    ],
)
def test_one_that_does_not_is_named(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str) -> None:
    fields = dataclasses.asdict(MUTANTS["final-norm-forgotten"]) | change
    monkeypatch.setattr(mutations, "MUTANTS", {"broken": mutations.Mutant(**fields)})
    with pytest.raises(mutations.Unfit, match=f"broken: .*{message}"):
        mutations.check_the_table(["broken"])
