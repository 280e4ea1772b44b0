"""Text to tokens, as the tasks need them."""

from __future__ import annotations

from typing import Any

import numpy as np

from zero_tp.evaluation.scoring import Tokens


class TextEncoder:
    """A tokenizer, with the ways in which the tasks use it."""

    def __init__(self, tokenizer: Any):
        """
        Args:
            tokenizer: with a bos or an eos token.
        """
        self.tokenizer = tokenizer

    @property
    def prefix_token(self) -> int:
        """What stands before a text: bos, or eos when there is none."""
        tokenizer = self.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        assert isinstance(found, int)
        return found

    def plain(self, text: str) -> Tokens:
        """The text's tokens and no others. As in preparing a corpus, a text that spells a special token is text."""
        # verbose: no warning about the length.
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return np.array(ids, dtype=np.int64)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """(context, continuation) as lm-eval encodes them: the continuation's tokens are those that follow the
        context's in the two together, and spaces between belong to the continuation.

        The context has the special tokens that the tokenizer puts before a text; an empty one is the prefix token.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not kept:
            return [self.prefix_token], self.tokenizer.encode(continuation, add_special_tokens=False, verbose=False)
        whole = self.tokenizer.encode(kept + continuation, verbose=False)
        before = self.tokenizer.encode(kept, verbose=False)
        return before, whole[len(before) :]
