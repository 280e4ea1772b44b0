"""WikiText-103's perplexity as "Megatron-LM" reports it (arXiv 1909.08053, section 5.3 and appendix E.1).

The tokenised text is detokenised, cut into sub-words, and scored by overlapping windows (perplexity.py); the sum is
divided by T_o, the tokens of the original file: ppl = exp(Σ NLL / T_o), which doesn't depend on the tokenizer. The
paper's released code divides by T_o - 1, and leaves the text's first sub-word unscored; here it is scored after the
tokenizer's bos or eos token, as in the paper's sum.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from zero_tp.errors import UserError
from zero_tp.evaluation.perplexity import exp, sliding_windows, summed
from zero_tp.evaluation.scoring import Evaluator, Report, Tokens, unreported

OVERLAP = 32
TEST_TOKENS = 245_566
"""T_o of the test split."""


def original_tokens(text: str) -> int:
    """T_o: tokens between single spaces. Line breaks stand between spaces in the file, so each of them counts."""
    return len(text.strip().split(" "))


def check_detokeniser() -> None:
    """UserError: lm-eval isn't installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "wikitext103 uses lm-eval's detokeniser, which is not installed: pip install -c constraints.txt -e .[eval]"
        )


def detokenised(text: str) -> str:
    """The text without the spaces and the `@-@` of tokenisation. lm-eval's function performs Megatron-LM's steps."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    found: str = wikitext_detokenizer({"page": text})
    return found


def wikitext103(
    text: str,
    encode: Callable[[str], Tokens],
    evaluator: Evaluator,
    *,
    prefix_token: int,
    sequence_length: int,
    overlap: int = OVERLAP,
    report: Report = unreported,
) -> dict[str, Any]:
    """The split's figures: `nll` (nats), T (`tokens`), T_o (`original_tokens`), and three perplexities. Collective.

    Args:
        text: the whole split in its tokenised form, as in wiki.test.tokens.
        encode: text → token ids, without special tokens.
        sequence_length, overlap: s and o, tokens.

    Returns:
        `perplexity` by T_o, `perplexity_released_code` by T_o - 1, `perplexity_subword` by T; None where it overflows;
        `windows` and `tokens_computed`, the tokens that the model read.
    """
    ids = encode(detokenised(text))
    rows = list(sliding_windows(np.concatenate(([prefix_token], ids)), sequence_length, overlap))
    nll, words = summed(evaluator, rows, report), original_tokens(text)
    divisors = {
        "perplexity": words,
        "perplexity_released_code": words - 1,
        "perplexity_subword": len(ids),
    }
    perplexities = {name: exp(nll / count) if count else float("inf") for name, count in divisors.items()}
    return {
        "nll": nll,
        "tokens": len(ids),
        "original_tokens": words,
        **{name: value if np.isfinite(value) else None for name, value in perplexities.items()},
        "windows": len(rows),
        "tokens_computed": sum(map(len, rows)),
    }
