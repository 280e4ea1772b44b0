"""LAMBADA (arXiv 1606.06031): is a passage's last word what the model says?

All sub-words of the word must be the arg-max under teacher forcing for the passage to count as right (arXiv 1909.08053,
section 5.3 and appendix E.2). Tokens are cut as lm-eval does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zero_tp.errors import UserError
from zero_tp.evaluation.perplexity import exp
from zero_tp.evaluation.scoring import Evaluator, Report, Row, unreported
from zero_tp.evaluation.text import TextEncoder


@dataclass(frozen=True)
class Passage:
    """What stands before the last word, without the space, and the word."""

    context: str
    word: str

    @classmethod
    def of_text(cls, text: str) -> Passage:
        """From a whole passage, whose last word follows white space. ValueError: fewer than two words."""
        parts = text.strip().rsplit(maxsplit=1)
        if len(parts) < 2:
            raise ValueError("a passage needs two words at least")
        return cls(*parts)


def cloze(
    passages: Sequence[Passage],
    encoder: TextEncoder,
    evaluator: Evaluator,
    *,
    positions: int,
    report: Report = unreported,
) -> dict[str, Any]:
    """Accuracy and the target's perplexity. Collective: every rank gives the same passages.

    Args:
        positions: tokens that the model can read; of longer passages the last ones are read.

    Returns:
        `accuracy` and its standard error, `perplexity` (e to the mean NLL of a whole word, None where it overflows),
        `nll` (nats), `examples`, `tokens` scored, `tokens_computed`, and `truncated`: passages that are longer.
    """
    pairs = [encoder.pair(passage.context, " " + passage.word) for passage in passages]
    rows = [cut(before, word, positions) for before, word in pairs]
    scores = [scores[0] for scores in evaluator.score(rows, report)]
    count, nll = len(scores), math.fsum(score.nll for score in scores)
    accuracy, perplexity = sum(score.greedy for score in scores) / count, exp(nll / count)
    return {
        "accuracy": accuracy,
        "accuracy_standard_error": math.sqrt(accuracy * (1 - accuracy) / (count - 1)) if count > 1 else None,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "nll": nll,
        "examples": count,
        "tokens": sum(row.scored for row in rows),
        "tokens_computed": sum(map(len, rows)),
        "truncated": sum(len(before) + len(word) > positions + 1 for before, word in pairs),
    }


def cut(context: Sequence[int], continuation: Sequence[int], positions: int) -> Row:
    """A row that scores the continuation, cut on the left to what the model can read.

    UserError: the continuation alone is longer.
    """
    if len(continuation) > positions:
        raise UserError(
            f"a continuation of {len(continuation):,} tokens is longer than the {positions:,} that the model reads"
        )
    tokens = np.array([*context, *continuation][-(positions + 1) :], dtype=np.int64)
    return Row(tokens, len(continuation))
