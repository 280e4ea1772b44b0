"""Tasks run on a subject: it reads text with a model, and deals batches of rows to data-parallel ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

from zero_tp.constants import IGNORE_INDEX
from zero_tp.evaluation.scoring import Row, Score, Scorer, Tokens, padded
from zero_tp.topology import Topology

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
R = TypeVar("R")

Report = Callable[[int, int], None]
"""(tokens that the model has read so far, tokens in all)."""


def unreported(done: int, total: int) -> None:
    """Tell nobody how far it is."""


@dataclass(frozen=True)
class Subject:
    """A subject is a model with its tokenizer, on the ranks that share its rows.

    Batches are made of all rows, whatever the number of ranks, and dealt to the data-parallel ranks in turn: every
    grid computes the same sums. Each rank computes equally many batches (ZeRO-3 needs that): where they don't divide,
    the last is computed again and counts once.

    Attributes:
        module: what has `generate`, for tasks that generate text.
        tokenizer: with a bos or an eos token.
        positions: tokens of a window, and of the longest context.
        batch_size: rows of a batch.
        topology: the grid; by default one process.
        lock_step: ranks must run equally many forwards (ZeRO-3), also while they generate.
        quiet: no progress bar.
    """

    scorer: Scorer
    module: Any
    tokenizer: Any
    config: PretrainedConfig
    positions: int
    batch_size: int = 8
    device: torch.device | str = "cpu"
    topology: Topology = field(default_factory=Topology)
    lock_step: bool = False
    quiet: bool = False

    @property
    def prefix_token(self) -> int:
        """The token that stands before a text is bos, or eos when there is none."""
        tokenizer = self.tokenizer
        found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        assert isinstance(found, int)
        return found

    def encode(self, text: str) -> Tokens:
        """Return the text's tokens and no others; as in preparing a corpus, a special token's spelling is text."""
        # verbose: no warning about the length.
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return np.array(ids, dtype=np.int64)

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode (context, continuation) as lm-eval does: the continuation's tokens are those that follow the context's
        in the two together, and spaces between belong to the continuation.

        The context has the special tokens that the tokenizer puts before a text; an empty one is the prefix token.
        """
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        if not kept:
            return [self.prefix_token], self.tokenizer.encode(continuation, add_special_tokens=False, verbose=False)
        whole = self.tokenizer.encode(kept + continuation, verbose=False)
        before = self.tokenizer.encode(kept, verbose=False)
        return before, whole[len(before) :]

    @contextlib.contextmanager
    def progress(self, title: str) -> Iterator[Report]:
        """Show a bar with the time left on rank 0's terminal."""
        disable = True if self.quiet or self.topology.rank else None  # None: where stderr is no terminal
        with tqdm(desc=title, unit=" tokens", unit_scale=True, disable=disable, leave=False) as bar:

            def report(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield report

    def map(
        self, function: Callable[[T], R], batches: Sequence[T], size: Callable[[T], int], report: Report
    ) -> list[R]:
        """Compute `function` of every batch, each on one DP rank; every rank gets all, in order. Collective.

        Args:
            size: what a batch adds to the report.
        """
        ranks, rank = self.topology.data, self.topology.data_rank
        mine: list[R] = []
        done, total = 0, sum(map(size, batches))
        for start in range(0, len(batches), ranks):
            result = function(batches[min(start + rank, len(batches) - 1)])
            if start + rank < len(batches):
                mine.append(result)
            done += sum(map(size, batches[start : start + ranks]))
            report(done, total)
        if ranks == 1:
            return mine
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, mine, group=self.topology.data_group)
        return [everyone[index % ranks][index // ranks] for index in range(len(batches))]

    @torch.no_grad()  # not inference_mode: what ZeRO-3 gathers here it would keep for training
    def score(self, rows: Sequence[Row], report: Report = unreported) -> list[list[Score]]:
        """Score every row; every rank gets all, in order: of its own targets, then with each alternative. Collective.

        Long rows come first: a batch's rows are of about one length, and memory runs out at once or never.
        """
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        scores = self.map(
            lambda batch: self._score([rows[index] for index in batch]),
            batches,
            lambda batch: sum(len(rows[index]) for index in batch),
            report,
        )
        by_row = dict(zip(order, (of_row for of_batch in scores for of_row in of_batch), strict=True))
        return [by_row[index] for index in range(len(rows))]

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
