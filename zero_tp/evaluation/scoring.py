"""Rows of tokens to what their targets cost: how rows are batched and split over data-parallel ranks, and how a model
of zero_tp or of transformers scores a batch.

b batch, n tokens of a row, k alternatives, v vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX
from zero_tp.parallel.scores import TokenScores, scores_of_logits
from zero_tp.topology import Topology

T = TypeVar("T")
R = TypeVar("R")

Tokens = npt.NDArray[np.int64]
Report = Callable[[int, int], None]
"""(tokens that the model has read so far, tokens in all)."""


def unreported(done: int, total: int) -> None:
    """Nobody wants to know how far it is."""


@dataclass(frozen=True)
class Row:
    """One row for the model.

    Attributes:
        tokens: int64 [n + 1]: the model reads all but the last, and its targets are all but the first.
        scored: how many of the targets count, the last ones; at least 1.
        alternatives: other tokens in the last target's place. They cost no forward of their own.
    """

    tokens: Tokens
    scored: int
    alternatives: tuple[int, ...] = ()

    def __len__(self) -> int:
        """n, the tokens that the model reads."""
        return len(self.tokens) - 1


class Score(NamedTuple):
    """Of the scored targets of a row together: negative log-likelihood in nats, and whether each was the arg-max."""

    nll: float
    greedy: bool


class Scorer(Protocol):
    """A model that scores a batch. Called equally often on every rank of its grid."""

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        """int64 input ids [b, n] and labels [b, n, k] → scores [b, n, k], 0 and False where a label is -100.

        Labels are already shifted: `labels[i, j]` are tokens after `input_ids[i, j]`.
        """


class Evaluator:
    """A model, and the ranks that share its rows.

    Batches are made of all rows, whatever the number of ranks, and dealt to the data-parallel ranks in turn: every
    grid computes the same sums. Each rank computes equally many batches (ZeRO-3 needs that): where they don't divide,
    the last is computed again and counts once.

    Args:
        batch_size: rows of a batch.
        topology: the grid; by default one process.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        batch_size: int = 8,
        device: torch.device | str = "cpu",
        topology: Topology | None = None,
    ):
        self.scorer, self.batch_size, self.device = scorer, batch_size, device
        self.topology = topology or Topology()

    def map(
        self, function: Callable[[T], R], batches: Sequence[T], after: Callable[[Sequence[T]], None] = lambda _: None
    ) -> list[R]:
        """`function` of every batch, in order, on every rank; each is computed by one DP rank. Collective.

        Args:
            after: called with the batches that all ranks have computed since the last call.
        """
        ranks, rank = self.topology.data, self.topology.data_rank
        mine: list[R] = []
        for start in range(0, len(batches), ranks):
            result = function(batches[min(start + rank, len(batches) - 1)])
            if start + rank < len(batches):
                mine.append(result)
            after(batches[start : start + ranks])
        if ranks == 1:
            return mine
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine, group=self.topology.data_group)
        return [everyone[index % ranks][index // ranks] for index in range(len(batches))]

    @torch.no_grad()  # not inference_mode: what ZeRO-3 gathers here it would keep for training
    def score(self, rows: Sequence[Row], report: Report = unreported) -> list[list[Score]]:
        """Scores of every row, in order, on every rank: of its own targets, then with each alternative. Collective.

        Long rows come first: a batch's rows are of about one length, and memory runs out at once or never.
        """
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        done, total = 0, sum(map(len, rows))

        def after(computed: Sequence[list[int]]) -> None:
            nonlocal done
            done += sum(len(rows[index]) for batch in computed for index in batch)
            report(done, total)

        scores = self.map(lambda batch: self._score([rows[index] for index in batch]), batches, after)
        found: list[list[Score]] = [[] for _ in rows]
        for batch, of_batch in zip(batches, scores, strict=True):
            for index, of_row in zip(batch, of_batch, strict=True):
                found[index] = of_row
        return found

    def _score(self, rows: Sequence[Row]) -> list[list[Score]]:
        input_ids, labels = padded(rows)
        nll, greedy = self.scorer(input_ids.to(self.device), labels.to(self.device))
        # An alternative's label stands in the last place alone: with one target to score its sum is that target's.
        sums = nll.double().sum(1).tolist()
        firsts = (greedy | (labels == IGNORE_INDEX).to(greedy.device)).all(1).tolist()
        return [
            [Score(*score) for score in zip(sums[row][:used], firsts[row][:used], strict=True)]
            for row, used in enumerate(1 + len(each.alternatives) for each in rows)
        ]


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Input ids [b, n] and labels [b, n, k] for the longest row and the most alternatives.

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
    """A `Scorer` of a `ZeroTPForCausalLM`, alone or inside a DeepSpeed engine."""

    def __init__(self, model: Any):
        """
        Args:
            model: what is called: the model, or the engine that has it.
        """
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        output = self.model(input_ids, shift_labels=labels, reduction="none")
        return TokenScores(output.loss, output.greedy)


class HuggingFaceScorer:
    """A `Scorer` of a Hugging Face causal language model.

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
                place = (some + start, columns[at])
                nll[place], greedy[place] = scores_of_logits(logits[some, at].float(), labels[place])
        return TokenScores(nll.masked_fill_(labels == IGNORE_INDEX, 0.0), greedy & (labels != IGNORE_INDEX))
