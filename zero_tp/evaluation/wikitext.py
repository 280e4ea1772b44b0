"""WikiText-103's perplexity is computed as "Megatron-LM" reports it (arXiv 1909.08053, section 5.3 and appendix E.1).

The tokenised text is detokenised, cut into sub-words, and scored by overlapping windows (perplexity.py); the sum is
divided by T_o, the tokens of the original file: ppl = exp(Σ NLL / T_o), which doesn't depend on the tokenizer. The
paper's released code divides by T_o - 1, and leaves the text's first sub-word unscored; here it is scored after the
tokenizer's bos or eos token, as in the paper's sum.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zero_tp.errors import UserError
from zero_tp.evaluation.perplexity import Perplexity, PerplexityTask
from zero_tp.evaluation.task import Origin, TaskOptions, read_hub, read_texts, require_lm_eval
from zero_tp.training.metrics import perplexity

OVERLAP = 32
TEST_TOKENS = 245_566
"""T_o of the test split."""


def original_tokens(text: str) -> int:
    """Count T_o: tokens between single spaces. Line breaks stand between spaces in the file, so each of them counts."""
    return len(text.strip().split(" "))


def detokenised(text: str) -> str:
    """Return the text without the spaces and the `@-@` of tokenisation. lm-eval's function does Megatron-LM's steps."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    found: str = wikitext_detokenizer({"page": text})
    return found


def wikitext_split(path: Path | None, text_key: str) -> tuple[str, Origin]:
    """Read the tokenised text of one split: the file's, which is one text, or the test split from the hub.

    UserError: no text, or several, or the hub's can't be had.
    """
    if path is not None:
        texts, origin = read_texts(path, text_key)
        if len(texts) > 1:
            raise UserError(
                f"{path}: {len(texts):,} texts, where wikitext103 is one: give the split's own file, "
                "such as wiki.test.tokens with .txt for its ending"
            )
        return texts[0], origin
    records, origin = read_hub("wikitext103", "Salesforce/wikitext", "wikitext-103-v1", "wiki.test.tokens")
    # The hub's lines are the file's, but for blank ones, whose space it takes away.
    text = "".join(record["text"] or " \n" for record in records)
    if original_tokens(text) != TEST_TOKENS:
        raise UserError(
            f"wikitext103: the hub's test split has {original_tokens(text):,} tokens, not the {TEST_TOKENS:,} of the "
            "original file: give that with --data wikitext103=FILE"
        )
    return text, origin


class WikitextTask(PerplexityTask):
    """The task divides a split's NLL by T_o (`perplexity`), T_o - 1 (`perplexity_released_code`) and T
    (`perplexity_subword`)."""

    name = "wikitext103"
    logged = ("perplexity", "perplexity_released_code", "perplexity_subword")

    def __init__(self, file: Path | None, options: TaskOptions):
        if options.limit is not None:
            raise UserError(f"--limit {options.limit}: wikitext103 is one text; leave the limit out, or the task")
        require_lm_eval("the detokeniser of wikitext103")
        text, self.origin = wikitext_split(file, options.text_key)
        self.documents, self.original_tokens = [detokenised(text)], original_tokens(text)
        self.overlap = options.overlap or OVERLAP

    def chosen(self, found: Perplexity) -> dict[str, Any]:
        divisors = {
            "perplexity": self.original_tokens,
            "perplexity_released_code": self.original_tokens - 1,
            "perplexity_subword": found.tokens,
        }
        return {
            "nll": found.nll,
            "tokens": found.tokens,
            "original_tokens": self.original_tokens,
            **{name: perplexity(found.nll / count) if count else None for name, count in divisors.items()},
            "windows": found.windows,
            "tokens_computed": found.tokens_computed,
        }
