"""Rows of tokens that a task makes and a model scores. Making them needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zero_tp.errors import UserError

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Row:
    """Tokens that the model reads at once.

    Attributes:
        tokens: int64 [n + 1]: the model reads all but the last, and its targets are all but the first.
        scored: number of targets that count, the last ones; at least 1.
        alternatives: other tokens in the last target's place, scored by the same forward.
    """

    tokens: Tokens
    scored: int
    alternatives: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return n, the number of tokens that the model reads."""
        return len(self.tokens) - 1


def continuation_rows(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], positions: int) -> tuple[list[Row], int]:
    """Make rows that score each continuation after its context, truncated on the left to `positions` tokens.

    Returns:
        The rows, and how many were truncated.

    Raises:
        UserError: a continuation or a context has no token, or a continuation alone has more than `positions`.
    """
    rows, truncated = [], 0
    for context, continuation in pairs:
        if not len(continuation) or not len(context):
            part = "context" if len(continuation) else "continuation"
            raise UserError(
                f"a {part} has no token: the tokenizer finds none in its text; give another text or tokenizer"
            )
        if len(continuation) > positions:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the {positions:,} that the model reads"
            )
        tokens = np.array([*context, *continuation], dtype=np.int64)
        truncated += len(tokens) > positions + 1
        rows.append(Row(tokens[-(positions + 1) :], len(continuation)))
    return rows, truncated
