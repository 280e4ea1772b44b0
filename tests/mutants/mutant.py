"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        imitates: the silent failure, in a sentence.
        old: occurs exactly once in `file`, so that a mutant whose code has changed is noticed.
        tests: pytest node ids, of which at least one must fail.
        guard: words of the library's own check that stops a run of this mutant.
    """

    imitates: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    guard: str = ""
