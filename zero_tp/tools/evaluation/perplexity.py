"""Perplexity of a text under a causal language model, by sliding windows.

WikiText-103's is that of arXiv 1909.08053.

Each document is scored separately, after the tokenizer's bos token (eos if it has none). So every
token is a target, as in training, where an eos precedes each document.

Windows of s tokens advance by o tokens: a stride, which arXiv 1909.08053, appendix E.1, calls the
overlap. The first window scores all its targets, each later one only its last o, which have at
least s - o tokens of context. With o = s each token is read once; with o = 1 every token but the
first s has the longest context, at s times the cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zero_tp.base.errors import UserError
from zero_tp.run import metrics
from zero_tp.tools.evaluation.rows import Row, Tokens, prefix_token
from zero_tp.tools.evaluation.settings import TaskOptions
from zero_tp.tools.evaluation.task import (
    Origin,
    Task,
    read_hub_test_split,
    read_texts,
    require_lm_eval,
)

if TYPE_CHECKING:
    from zero_tp.tools.evaluation.eval_model import EvalModel

WIKITEXT_OVERLAP = 32
WIKITEXT_TEST_TOKENS = 245_566
"""T_o of the test split."""


def sliding_windows(tokens: Tokens, sequence_length: int, stride: int) -> Iterator[Row]:
    """Yield rows that together score each of `tokens[1:]` exactly once; `tokens[0]` is context
    only.
    """
    assert 1 <= stride <= sequence_length
    targets = len(tokens) - 1
    # Windows of s = 4 that advance by o = 2, over tokens 0 to 7:
    #
    #     inputs     0 1 2 3                scores 1 2 3 4
    #     inputs         2 3 4 5            scores     5 6     after 3 and 4 tokens of context
    #     inputs             4 5 6          scores       7     the last one is shorter
    #
    # Each of 1 to 7 is scored once; all but the first window's have s - o tokens before them or
    # more.
    start, done = 0, 0  # the window reads tokens [start, start + s); `done` targets are scored
    while done < targets:
        end = min(start + sequence_length, targets)
        yield Row(tokens[start : end + 1], end - done)
        done = end
        start += stride


def perplexity(
    documents: Iterable[str],
    model: EvalModel,
    *,
    overlap: int | None = None,
    title: str = "perplexity",
) -> dict[str, Any]:
    """Return the perplexity of `documents`, each scored separately, in windows of the model's
    positions.

    Collective: every rank passes the same documents. Memory: 8 bytes per token of all documents,
    and one batch.

    Args:
        overlap: the stride o, from 1 to s; by default s.
        title: of the progress bar and of the error.

    Returns:
        `nll`, the summed negative log-likelihood in nats; its divisors `tokens`, `words`,
        `characters` (code points) and `bytes` (UTF-8); `documents` with tokens; `windows`;
        `tokens_computed`, read by the model without padding; and the quotients. Only those per
        token depend on the tokenizer.
    """
    counts = dict.fromkeys(("tokens", "words", "characters", "bytes", "documents"), 0)
    rows: list[Row] = []
    for text in documents:
        ids = model.encode(text)
        if not len(ids):
            continue
        counts["documents"] += 1
        counts["tokens"] += len(ids)
        counts["words"] += len(text.split())
        counts["characters"] += len(text)
        counts["bytes"] += len(text.encode("utf-8"))
        # The prefix is context only, so the first token of a text is a target.
        tokens = np.concatenate(([prefix_token(model.tokenizer)], ids))
        rows += sliding_windows(tokens, model.window, overlap or model.window)
    if not rows:
        raise UserError(f"{title}: the text has no token; give another text or tokenizer")
    # fsum rounds once, so the order does not matter.
    nll = math.fsum(of_row[0].nll for of_row in model.score(rows, title))
    return {
        "nll": nll,
        **counts,
        "windows": len(rows),
        "tokens_computed": sum(map(len, rows)),
        "loss": nll / counts["tokens"],
        "perplexity": metrics.perplexity(nll / counts["tokens"]),
        "word_perplexity": metrics.perplexity(nll / counts["words"]),
        "bits_per_byte": nll / math.log(2) / counts["bytes"],
        "bits_per_character": nll / math.log(2) / counts["characters"],
    }


class PerplexityTask(Task):
    """Perplexity of any text, each document separately."""

    name = "perplexity"
    logged = ("perplexity", "word_perplexity", "bits_per_byte")

    def __init__(self, file: Path | None, options: TaskOptions):
        if file is None:
            raise UserError(
                "perplexity needs a text: --data perplexity=FILE (.txt or .jsonl, each also .gz)"
            )
        self.documents, self.origin = read_texts(file, options.text_key, options.limit)
        self.overlap = options.overlap

    def check(self, window: int, tokenizer: Any) -> None:
        if self.overlap is not None and not 1 <= self.overlap <= window:
            raise UserError(f"--overlap {self.overlap}: from 1 to the window's {window:,} tokens")

    def compute_metrics(self, model: EvalModel) -> dict[str, Any]:
        result = perplexity(self.documents, model, overlap=self.overlap, title=self.name)
        return {"data": self.origin, "overlap": self.overlap or model.window, **result}


# --- WikiText-103 ---------------------------------------------------------------------------------


def original_tokens(text: str) -> int:
    """Return T_o, the number of tokens between single spaces.

    The file has spaces around line breaks, so those are tokens too.
    """
    return len(text.strip().split(" "))


def detokenize(text: str) -> str:
    """Return the text before WikiText's tokenization.

    lm-eval's function is used, which follows Megatron-LM's steps.
    """
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    detokenized: str = wikitext_detokenizer({"page": text})
    return detokenized


def wikitext_split(path: Path | None, text_key: str) -> tuple[str, Origin]:
    """Read the tokenized text of one split: a file with one text, or the test split from the
    hub.
    """
    if path is not None:
        texts, origin = read_texts(path, text_key)
        if len(texts) > 1:
            raise UserError(
                f"{path}: {len(texts):,} texts, but wikitext103 is one; give the split's original "
                "file, such as "
                "wiki.test.tokens renamed to .txt"
            )
        return texts[0], origin
    records, origin = read_hub_test_split(
        "wikitext103", "Salesforce/wikitext", "wikitext-103-v1", "wiki.test.tokens"
    )
    # The hub's lines are the file's, except that blank lines lack their space.
    text = "".join(record["text"] or " \n" for record in records)
    # T_o divides the sum of all losses: another split, or lines joined differently, would give a
    # figure that looks like the paper's and is not.
    if original_tokens(text) != WIKITEXT_TEST_TOKENS:
        raise UserError(
            f"wikitext103: the hub's test split has {original_tokens(text):,} tokens, not the "
            f"{WIKITEXT_TEST_TOKENS:,} of the original file; give that with --data wikitext103=FILE"
        )
    return text, origin


class WikitextTask(PerplexityTask):
    """WikiText-103's perplexity as in arXiv 1909.08053 (section 5.2, appendix E.1).

    The tokenized text is detokenized and scored in overlapping windows. The NLL is divided by T_o,
    the tokens of the original file (`perplexity`); by T_o - 1, as the paper's released code does
    (`perplexity_released_code`); and by T, the sub-words (`perplexity_subword`). The released code
    does not score the first sub-word; this task does.
    """

    name = "wikitext103"
    logged = ("perplexity", "perplexity_released_code", "perplexity_subword")

    def __init__(self, file: Path | None, options: TaskOptions):
        require_lm_eval("the detokenizer of wikitext103")
        text, self.origin = wikitext_split(file, options.text_key)
        self.documents = [detokenize(text)]
        self.original_tokens = original_tokens(text)
        self.overlap = options.overlap or WIKITEXT_OVERLAP

    def compute_metrics(self, model: EvalModel) -> dict[str, Any]:
        result = super().compute_metrics(model)
        divisors = {
            "perplexity": self.original_tokens,
            "perplexity_released_code": self.original_tokens - 1,
            "perplexity_subword": result["tokens"],
        }
        perplexities = {
            name: metrics.perplexity(result["nll"] / count) if count else None
            for name, count in divisors.items()
        }
        shared = {
            name: result[name]
            for name in ("data", "overlap", "nll", "tokens", "windows", "tokens_computed")
        }
        return {**shared, "original_tokens": self.original_tokens, **perplexities}
