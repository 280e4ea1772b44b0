"""The pseudo-perplexity of a text under an encoder: each token is masked alone, and scored from what stands around it
(arXiv 1910.14659).

A document is cut into windows of s - 2 tokens, `[CLS] window [SEP]`, of which each token has a forward of its own: s
tokens are read for each that is scored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.evaluation.subject import Score, Subject, Tokens
from zero_tp.evaluation.task import Task, TaskOptions, read_texts
from zero_tp.training import metrics

SPECIAL = 2
"""Tokens that stand around a window."""


class Hidden(NamedTuple):
    """One token of a row, `[CLS] window [SEP]`, that is masked alone."""

    tokens: Tokens
    place: int


class MaskedTask(Task):
    """The task gives how many tokens an encoder has right when each is masked alone, and the pseudo-perplexity."""

    name = "masked"
    causal = False

    def __init__(self, file: Path | None, options: TaskOptions):
        assert file is not None
        if options.overlap is not None:
            raise UserError("--overlap: masked has windows that don't overlap; leave it out")
        self.documents, self.origin = read_texts(file, options.text_key, options.limit)

    def check(self, positions: int) -> None:
        if positions <= SPECIAL:
            raise UserError(
                f"--sequence-length {positions}: masked needs {SPECIAL + 1}, of which {SPECIAL} are special"
            )

    def figures(self, subject: Subject) -> dict[str, Any]:
        words = sum(len(text.split()) for text in self.documents)
        rows = self._rows(subject)
        subject.agree(row.tobytes() for row in rows)
        hidden = [Hidden(row, place) for row in rows for place in range(1, len(row) - 1)]
        if not hidden:
            raise UserError(f"{self.name}: the tokenizer finds no token in the text; give another text or tokenizer")
        # Rows of one length together, so that nothing is padded; long ones first.
        ordered = sorted(hidden, key=lambda one: -len(one.tokens))
        alike = [list(group) for _, group in groupby(ordered, key=lambda one: len(one.tokens))]
        batches = [
            group[start : start + subject.batch_size]
            for group in alike
            for start in range(0, len(group), subject.batch_size)
        ]
        with subject.progress(self.name) as report:
            scored = subject.map(
                lambda batch: _score(subject, batch),
                batches,
                lambda batch: sum(len(one.tokens) for one in batch),
                report,
            )
        scores = [score for of_batch in scored for score in of_batch]
        tokens, nll = len(scores), math.fsum(score.nll for score in scores)
        return {
            "data": self.origin,
            "documents": len(self.documents),
            "words": words,
            "tokens": tokens,
            "tokens_computed": sum(len(one.tokens) for one in hidden),
            "nll": nll,
            "loss": nll / tokens,
            "accuracy": sum(score.greedy for score in scores) / tokens,
            "pseudo_perplexity": metrics.perplexity(nll / tokens),
            "word_pseudo_perplexity": metrics.perplexity(nll / words),
        }

    def _rows(self, subject: Subject) -> list[Tokens]:
        tokenizer, length = subject.tokenizer, subject.positions - SPECIAL
        rows = []
        for text in self.documents:
            ids = subject.encode(text)
            for start in range(0, len(ids), length):
                window = ids[start : start + length]
                rows.append(np.concatenate(([tokenizer.cls_token_id], window, [tokenizer.sep_token_id])))
        return rows


def _score(subject: Subject, batch: Sequence[Hidden]) -> list[Score]:
    """Score the masked tokens of rows that are equally long."""
    ids = torch.from_numpy(np.stack([one.tokens for one in batch]))
    places = torch.tensor([one.place for one in batch]).unsqueeze(1)
    labels = torch.full_like(ids, IGNORE_INDEX).scatter(1, places, ids.gather(1, places))
    given = ids.scatter(1, places, subject.tokenizer.mask_token_id)
    nll, greedy = subject.scorer(given.to(subject.device), labels.unsqueeze(2).to(subject.device))
    sums, firsts = nll.double().sum((1, 2)).tolist(), greedy.any(2).any(1).tolist()
    return [Score(*score) for score in zip(sums, firsts, strict=True)]
