"""Did you mean: the nearest valid name for a mistyped one."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """`did you mean "NAME"?`, or the list of valid names when none is near.

    A candidate may be a dotted path (`parallel.tensor`): its last part counts as a name too, so that a right name in
    a wrong place finds its place.
    """
    names = list(dict.fromkeys(valid))
    by_spelling: dict[str, str] = {}
    for name in names:
        by_spelling.setdefault(name.lower(), name)
    for name in names:
        by_spelling.setdefault(name.rsplit(".", 1)[-1].lower(), name)
    near = (
        difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.8)
        or sorted((spelling for spelling in by_spelling if len(wrong) > 4 and wrong.lower() in spelling), key=len)
        or difflib.get_close_matches(wrong.lower(), by_spelling, n=1, cutoff=0.6)
    )
    if near:
        return f'did you mean "{by_spelling[near[0]]}"?'
    return "valid: " + ", ".join(sorted(name for name in names if "." not in name))


def shown(value: object) -> str:
    """A JSON value as an error message shows it: as JSON, and cut after 60 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
