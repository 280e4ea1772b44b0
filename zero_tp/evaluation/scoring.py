"""A model of zero_tp or of transformers scores rows of tokens, a batch at a time.

b batch, n tokens of a row, k alternatives, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.parallel.scores import TokenScores, scores_of_logits

Tokens = npt.NDArray[np.int64]
Scorer = Callable[[Tensor, Tensor], TokenScores]
"""A model that scores a batch: int64 input ids [b, n] and labels [b, n, k] → scores [b, n, k], 0 and False where a
label is -100. Labels are already shifted: `labels[i, j]` are tokens after `input_ids[i, j]`. Called equally often on
every rank of its grid."""


@dataclass(frozen=True)
class Row:
    """A row is what the model reads at once.

    Attributes:
        tokens: int64 [n + 1]: the model reads all but the last, and its targets are all but the first.
        scored: how many of the targets count, the last ones; at least 1.
        alternatives: other tokens in the last target's place. They cost no forward of their own.
    """

    tokens: Tokens
    scored: int
    alternatives: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return n, the tokens that the model reads."""
        return len(self.tokens) - 1


def continuation_rows(pairs: Iterable[tuple[Sequence[int], Sequence[int]]], positions: int) -> tuple[list[Row], int]:
    """Make rows that score each continuation after its context, cut on the left to what the model can read.

    Returns:
        The rows, and how many had to be cut.

    Raises:
        UserError: a continuation alone is longer.
    """
    rows, truncated = [], 0
    for context, continuation in pairs:
        if len(continuation) > positions:
            raise UserError(
                f"a continuation of {len(continuation):,} tokens is longer than the {positions:,} that the model reads"
            )
        tokens = np.array([*context, *continuation], dtype=np.int64)
        truncated += len(tokens) > positions + 1
        rows.append(Row(tokens[-(positions + 1) :], len(continuation)))
    return rows, truncated


class Score(NamedTuple):
    """A score is of a row's scored targets: their negative log-likelihood in nats, and whether each was the arg-max."""

    nll: float
    greedy: bool


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return input ids [b, n] and labels [b, n, k] for the longest row and the most alternatives.

    Padding is on the right: a causal model's outputs don't depend on what follows, so it needs no attention mask.
    """
    longest = max(map(len, rows))
    alternatives = 1 + max(len(row.alternatives) for row in rows)
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest, alternatives), IGNORE_INDEX)
    for number, row in enumerate(rows):
        assert 1 <= row.scored <= len(row)
        assert row.scored == 1 or not row.alternatives
        tokens = torch.from_numpy(row.tokens)
        input_ids[number, : len(row)] = tokens[:-1]
        labels[number, len(row) - row.scored : len(row), 0] = tokens[len(tokens) - row.scored :]
        if row.alternatives:
            labels[number, len(row) - 1, 1 : 1 + len(row.alternatives)] = torch.tensor(row.alternatives)
    return input_ids, labels


class ParallelScorer:
    """This scorer calls a `ZeroTPForCausalLM`.

    Args:
        model: what is called: the model, or the DeepSpeed engine that has it.
    """

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        output = self.model(input_ids, shift_labels=labels, reduction="none")
        return TokenScores(output.loss, output.greedy)


class HuggingFaceScorer:
    """This scorer calls a Hugging Face causal language model.

    Only the positions that some row scores get logits, where the model takes `logits_to_keep`. Logits are made for at
    most `logits_bytes` at once (fp32 bytes, for one row at least): rows go through the model in smaller groups when a
    batch would need more. The fp32 copy is made in pieces of 128 positions.
    """

    POSITIONS = 128

    def __init__(self, model: Any, logits_bytes: int = 512 << 20) -> None:
        self.model = model.eval()
        self.logits_bytes = logits_bytes
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        scored = (labels != IGNORE_INDEX).any(2)  # [b, n]
        columns = scored.any(0).nonzero().squeeze(1) if self._keeps else torch.arange(labels.shape[1])
        nll = torch.zeros(labels.shape, device=labels.device)
        greedy = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
        options: dict[str, Any] = {"use_cache": False} | ({"logits_to_keep": columns} if self._keeps else {})
        vocabulary = self.model.config.get_text_config().vocab_size
        rows = max(1, self.logits_bytes // (max(1, len(columns)) * vocabulary * 4))
        for start in range(0, len(input_ids), rows):
            group = slice(start, start + rows)
            logits = self.model(input_ids=input_ids[group], **options).logits
            row, kept = scored[group][:, columns].nonzero(as_tuple=True)
            for some, at in zip(row.split(self.POSITIONS), kept.split(self.POSITIONS), strict=True):
                targets = (some + start, columns[at])
                nll[targets], greedy[targets] = scores_of_logits(logits[some, at].float(), labels[targets])
        return TokenScores(nll.masked_fill_(labels == IGNORE_INDEX, 0.0), greedy & (labels != IGNORE_INDEX))
