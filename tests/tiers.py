"""The tiers of the tests: what the plain test command runs, `thorough` (more of the same), and
`heavy` proofs.

The first tier shows every mechanism against its outside reference once; the second has the other
cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis
import pytest


def in_tiers(cases: Sequence[Any], first: Iterable[Any], every: int = 1) -> list[Any]:
    """Return `cases` for parametrize: those of `first`; every N-th of the others thorough, the
    rest heavy.
    """
    shown = list(first)
    assert shown and all(case in cases for case in shown)
    others = [case for case in cases if case not in shown]
    second = others[::every]

    def marks(case: Any) -> Any:
        if case in shown:
            return ()
        return THOROUGH if case in second else pytest.mark.heavy

    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks(case))
        for case in cases
    ]


def seeds_in_tiers(first: Iterable[int], second: int, count: int) -> list[Any]:
    """Return `count` seeds for parametrize: those of `first`, the others below `second`
    thorough, the rest heavy.
    """
    tiers = dict.fromkeys(range(second), THOROUGH) | dict.fromkeys(first, ())
    return [pytest.param(seed, marks=tiers.get(seed, pytest.mark.heavy)) for seed in range(count)]


def examples(first: int, thorough: int) -> hypothesis.settings:
    """Return settings with the number of examples of each tier, which runs with its own profile
    (conftest.py).

    The simplest example always comes first, so that two are the fewest with a random one.
    """
    # On a rank, which draws nothing, another.
    profile = hypothesis.settings.get_current_profile_name()
    of_profile = {"fast": min(first, 2), "thorough": thorough}
    return hypothesis.settings(max_examples=of_profile.get(profile, first))


THOROUGH = pytest.mark.thorough
EACH_STAGE = pytest.mark.parametrize(
    "stage",
    [
        pytest.param(0, marks=pytest.mark.heavy),
        1,
        pytest.param(2, marks=pytest.mark.heavy),
        pytest.param(3, marks=THOROUGH),
    ],
)
