"""Rows of tokens that a task makes and a model scores. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_tp.errors import UserError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """One sequence for the model.

    Attributes:
        tokens: int64 [n + 1]: all but the last are inputs, all but the first are targets.
        scored: the last `scored` targets are scored; at least 1.
        alternatives: other candidates for the last target, scored in the same forward.
    """

    tokens: Tokens
    scored: int
    alternatives: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return n, the number of input tokens."""
        return len(self.tokens) - 1


def continuation_rows(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], positions: int) -> tuple[list[Row], int]:
    """Make rows that score each continuation after its context, truncated on the left to `positions` input tokens.

    Returns:
        The rows, and how many were truncated.
    """
    rows, truncated = [], 0
    for context, continuation in pairs:
        if not len(continuation) or not len(context):
            part = "context" if len(continuation) else "continuation"
            raise UserError(f"a {part} has no token; give another text or tokenizer")
        if len(continuation) > positions:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the model's {positions:,} positions"
            )
        tokens = np.array([*context, *continuation], dtype=np.int64)
        truncated += len(tokens) > positions + 1
        rows.append(Row(tokens[-(positions + 1) :], len(continuation)))
    return rows, truncated
