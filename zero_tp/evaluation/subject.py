"""A subject is a model of zero_tp or of transformers with its tokenizer: it reads text, and scores rows of tokens.

Batches of rows are dealt to data-parallel ranks. b batch, n tokens of a row, k alternatives, v vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from zero_tp.constants import IGNORE_INDEX
from zero_tp.errors import UserError
from zero_tp.parallel.agreement import require_same_on_all_ranks
from zero_tp.parallel.scores import TokenScores, scores_of_logits
from zero_tp.topology import Topology

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
R = TypeVar("R")

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
        UserError: a continuation alone is longer, or has no token, or nothing stands before it.
    """
    rows, truncated = [], 0
    for context, continuation in pairs:
        if not len(continuation) or not len(context):
            part = "context" if len(continuation) else "continuation"
            raise UserError(
                f"a {part} has no token: the tokenizer finds none in its text; give another text or tokenizer"
            )
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


class EncoderScorer:
    """This scorer calls a `ZeroTPForPreTraining`. A label is that of its own position, and there is one alternative."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        output = self.model(input_ids, labels=labels.squeeze(2), reduction="none")
        return TokenScores(output.masked_loss.unsqueeze(2), output.masked_accuracy.unsqueeze(2))


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

    def agree(self, asked: Iterable[bytes]) -> None:
        """Check that all ranks ask the same: what they compute would not belong together. Collective.

        Raises:
            UserError: on every rank; a task's data or the tokenizer are others on another machine.
        """
        if self.topology.world > 1:
            digest = hashlib.sha256()
            for each in asked:
                digest.update(len(each).to_bytes(8) + each)
            require_same_on_all_ranks({"what a task asks of the model": f"SHA-256 {digest.hexdigest()[:12]}…"})

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

        Raises:
            UserError: see `agree`.
        """
        self.agree(row.tokens.tobytes() + repr((row.scored, row.alternatives)).encode() for row in rows)
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
