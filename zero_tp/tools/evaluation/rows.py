"""Rows of tokens that a task makes, and that `EvalModel` pads and scores in batches. Needs no
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_tp.base.errors import UserError

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


def prefix_token(tokenizer: Any) -> int:
    """Return the token before a text: bos, or eos if the tokenizer has no bos."""
    token: int = (
        tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    )
    return token


def encode_pair(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Tokenize (context, continuation) as lm-eval does.

    Both are tokenized together and split after as many tokens as the context alone has. Spaces
    between them belong to the continuation. The context gets the tokenizer's special tokens; an
    empty one becomes the prefix token.
    """
    # ("The sky is ", "blue") becomes ("The sky is", " blue"): a BPE puts a space before its word,
    # so "is " and "blue" apart would be tokens that no text has.
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    if not stripped:
        return [prefix_token(tokenizer)], tokenizer.encode(
            continuation, add_special_tokens=False, verbose=False
        )
    both = tokenizer.encode(stripped + continuation, verbose=False)
    # The context alone has k tokens; what follows the first k of both together is the continuation.
    before = tokenizer.encode(stripped, verbose=False)
    return before, both[len(before) :]


def check_continuations(
    task: str, pairs: Iterable[tuple[str, str]], positions: int, tokenizer: Any
) -> None:
    """Raise a UserError if a model of `positions` tokens can't score a continuation; see
    `continuation_rows`.

    Only continuations that may be empty or too long are tokenized: a character has at most 4 bytes,
    a token at least 1.
    """
    # At most `positions` bytes are at most `positions` tokens, so most pairs need no tokenizer.
    doubtful = (
        (context, continuation)
        for context, continuation in pairs
        if not continuation.strip()
        or 4 * (len(context + continuation) - len(context.rstrip())) > positions
    )
    try:
        continuation_rows((encode_pair(tokenizer, *pair) for pair in doubtful), positions)
    except UserError as error:
        raise UserError(f"{task}: {error}") from error


def continuation_rows(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], positions: int
) -> tuple[list[Row], int]:
    """Make rows that score each continuation after its context.

    Rows are truncated on the left to `positions` input tokens.

    Returns:
        The rows, and how many were truncated.
    """
    rows = []
    truncated = 0
    for context, continuation in pairs:
        if not len(continuation) or not len(context):
            part = "context" if len(continuation) else "continuation"
            raise UserError(f"a {part} has no token; give another text or tokenizer")
        if len(continuation) > positions:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the model's "
                f"{positions:,} positions; "
                "use a longer sequence length, or leave out that example"
            )
        tokens = np.array([*context, *continuation], dtype=np.int64)
        truncated += len(tokens) > positions + 1
        # One more than the positions: the last token is a target only.
        rows.append(Row(tokens[-(positions + 1) :], len(continuation)))
    return rows, truncated
