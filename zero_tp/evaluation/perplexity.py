"""The perplexity of a text under a causal language model is computed by sliding windows.

Each document is scored by itself, after the tokenizer's bos token (eos when it has none): so every one of its tokens is
a target, the first included, and the model sees what it saw in training, where an eos stands before each document.

Windows of s tokens advance by o, the overlap (arXiv 1909.08053, appendix E.1): the first window scores all its targets,
each later one only its last o, which therefore have at least s - o tokens of context. With o = s windows don't overlap
and each token is read once; with o = 1 every token but the first s has the longest context, at s times the cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zero_tp.errors import UserError
from zero_tp.evaluation.subject import Row, Subject, Tokens
from zero_tp.evaluation.task import Task, TaskOptions, read_texts
from zero_tp.training import metrics


@dataclass(frozen=True)
class Perplexity:
    """A perplexity has the sum of the losses, and what it can be divided by.

    Attributes:
        nll: summed negative log-likelihood, nats.
        tokens: sub-word tokens scored, T.
        words: words separated by white space.
        characters: Unicode code points.
        bytes: of the UTF-8 text.
        documents: scored; those without any token are left out.
        windows: rows that the model read.
        tokens_computed: tokens that it read, padding not counted; more than `tokens` where windows overlap.
    """

    nll: float = 0.0
    tokens: int = 0
    words: int = 0
    characters: int = 0
    bytes: int = 0
    documents: int = 0
    windows: int = 0
    tokens_computed: int = 0

    def figures(self) -> dict[str, float]:
        """Return the fields, nats a token (`loss`), e to that and to the nats a word, bits a byte and a character.

        Those a token depend on the tokenizer, the others don't.
        """
        return {
            **asdict(self),
            "loss": self.nll / self.tokens,
            "perplexity": metrics.perplexity(self.nll / self.tokens),
            "word_perplexity": metrics.perplexity(self.nll / self.words),
            "bits_per_byte": self.nll / math.log(2) / self.bytes,
            "bits_per_character": self.nll / math.log(2) / self.characters,
        }


def sliding_windows(tokens: Tokens, sequence_length: int, overlap: int) -> Iterator[Row]:
    """Yield rows that together score each of `tokens[1:]` exactly once.

    `tokens[0]` is context only. Windows wholly past the end don't exist, so none scores nothing.
    """
    assert 1 <= overlap <= sequence_length
    targets = len(tokens) - 1
    start, scored = 0, 0  # `scored` targets are done; the window reads tokens start … start + s - 1
    while scored < targets:
        end = min(start + sequence_length, targets)
        yield Row(tokens[start : end + 1], end - scored)
        scored = end
        start += overlap


def perplexity(
    documents: Iterable[str], subject: Subject, *, overlap: int | None = None, title: str = "perplexity"
) -> Perplexity:
    """Return the perplexity of `documents`, each scored by itself, in windows of the subject's positions.

    Collective: every rank gives the same documents. Memory: the tokens of all documents, 8 bytes each, and one batch.

    Args:
        overlap: o, 1 … s; None: s, so that windows don't overlap.
        title: of the bar.

    Raises:
        UserError: the documents have no token.
    """
    counts = dict.fromkeys(("tokens", "words", "characters", "bytes", "documents"), 0)
    rows: list[Row] = []
    for text in documents:
        ids = subject.encode(text)
        if not len(ids):
            continue
        counts["documents"] += 1
        counts["tokens"] += len(ids)
        counts["words"] += len(text.split())
        counts["characters"] += len(text)
        counts["bytes"] += len(text.encode("utf-8"))
        tokens = np.concatenate(([subject.prefix_token], ids))
        rows += sliding_windows(tokens, subject.positions, overlap or subject.positions)
    if not rows:
        raise UserError(f"{title}: the tokenizer finds no token in the text; give another text or tokenizer")
    with subject.progress(title) as report:
        # Rounded once: the same whatever the order of the batches.
        nll = math.fsum(scores[0].nll for scores in subject.score(rows, report))
    return Perplexity(nll=nll, **counts, windows=len(rows), tokens_computed=sum(map(len, rows)))


class PerplexityTask(Task):
    """The task gives the perplexity of any text, each document by itself."""

    name = "perplexity"
    logged = ("perplexity", "word_perplexity", "bits_per_byte")

    def __init__(self, file: Path | None, options: TaskOptions):
        assert file is not None
        self.documents, self.origin = read_texts(file, options.text_key, options.limit)
        self.overlap = options.overlap

    def check(self, positions: int) -> None:
        if self.overlap is not None and not 1 <= self.overlap <= positions:
            raise UserError(f"--overlap {self.overlap}: from 1 to the window's {positions:,} tokens")

    def figures(self, subject: Subject) -> dict[str, Any]:
        found = perplexity(self.documents, subject, overlap=self.overlap, title=self.name)
        return {"data": self.origin, "overlap": self.overlap or subject.positions, **self.chosen(found)}

    def chosen(self, found: Perplexity) -> dict[str, Any]:
        """Return what the report has of it."""
        return found.figures()
