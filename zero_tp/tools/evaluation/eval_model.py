"""Score rows of tokens with a model of zero_tp or transformers.

Data-parallel ranks share the batches.

Shapes: b batch, n tokens of a row, k alternatives.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.parallel.agreement import require_same_on_all_ranks
from zero_tp.parallel.token_scores import TokenScores, scores_of_logits
from zero_tp.parallel.topology import Topology
from zero_tp.tools.evaluation.rows import Row, Tokens

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
R = TypeVar("R")

Scorer = Callable[[Tensor, Tensor], TokenScores]
"""Scores a batch: int64 input ids [b, n] and labels [b, n, k] → scores [b, n, k], 0 and False where
a label is -100.

Labels are already shifted: `labels[i, j]` are candidates for the token after `input_ids[i, j]`.
Collective over TP.
"""


class Score(NamedTuple):
    """The score of a row.

    `nll` is the summed negative log-likelihood of its scored targets in nats, `greedy` whether all
    of them were the arg-max.
    """

    nll: float
    greedy: bool


def pad(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Return input ids [b, n] and labels [b, n, k], padded to the longest row and the most
    alternatives.

    Padding is on the right, so a causal model needs no attention mask.
    """
    # A row of tokens a b c d of which 2 are scored, and a row e f with the alternative g:
    #
    #     inputs    labels: target | alternative
    #     a b c     -|-  c|-  d|-
    #     e 0 0     f|g  -|-  -|-
    #
    # "-" is -100. Inputs are all tokens but the last, labels all but the first.
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
            labels[number, len(row) - 1, 1 : 1 + len(row.alternatives)] = torch.tensor(
                row.alternatives
            )
    return input_ids, labels


class ParallelScorer:
    """Scorer of a `ZeroTPForCausalLM`, or of the DeepSpeed engine around it."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        # "none": the loss of each label, [b, n, k], 0 where it is -100; and is it the argmax? The
        # output layer computes both from its own columns (parallel/token_scores.py): no rank
        # gathers logits.
        output = self.model(input_ids, shift_labels=labels, reduction="none")
        return TokenScores(output.loss, output.greedy)


class HuggingFaceScorer:
    """Scorer of a Hugging Face causal language model.

    With `logits_to_keep`, the model computes logits only at positions that some row scores. A batch
    whose fp32 logits exceed `logits_bytes` is split into smaller forwards. Logits are converted to
    fp32 in chunks of 128 positions.
    """

    POSITIONS = 128

    def __init__(self, model: Any, logits_bytes: int = 512 << 20) -> None:
        self.model = model.eval()
        self.logits_bytes = logits_bytes
        self._can_keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, input_ids: Tensor, labels: Tensor) -> TokenScores:
        scored = (labels != IGNORE_INDEX).any(2)  # [b, n]
        columns = torch.arange(labels.shape[1], device=labels.device)
        # [n] positions that at least one row scores. Rows of a batch end in different places, so
        # some logits are computed in vain, but never a whole prompt's.
        columns = columns[scored.any(0)] if self._can_keep_logits else columns
        nll = torch.zeros(labels.shape, device=labels.device)
        greedy = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
        options: dict[str, Any] = {"use_cache": False} | (
            {"logits_to_keep": columns} if self._can_keep_logits else {}
        )
        vocabulary = self.model.config.get_text_config().vocab_size
        # A vocabulary of 50,257 and 1,024 positions take 196 MiB a row in fp32, so 512 MiB hold two
        # rows.
        rows = max(1, self.logits_bytes // (max(1, len(columns)) * vocabulary * 4))
        for start in range(0, len(input_ids), rows):
            group = slice(start, start + rows)
            logits = self.model(input_ids=input_ids[group], **options).logits
            indices = scored[group][:, columns].nonzero(as_tuple=True)
            for row, column in zip(
                *(index.split(self.POSITIONS) for index in indices), strict=True
            ):
                targets = (row + start, columns[column])
                nll[targets], greedy[targets] = scores_of_logits(
                    logits[row, column].float(), labels[targets]
                )
        # A scored position has a score in each column, also where its row has fewer alternatives.
        return TokenScores(
            nll.masked_fill_(labels == IGNORE_INDEX, 0.0), greedy & (labels != IGNORE_INDEX)
        )


@dataclass(frozen=True)
class EvalModel:
    """A model and its tokenizer on a grid of ranks.

    Batches are formed before they are distributed to the data-parallel ranks, so every DP size
    computes the same sums. ZeRO-3 and expert parallelism need the same number of forwards on every
    rank: a rank without a batch repeats the last one's forward.

    Attributes:
        module: the model itself; tasks that generate text call its `generate`.
        tokenizer: has a bos or an eos token.
        window: the longest window or context, in tokens.
        batch_size: rows of a batch.
        topology: the grid; by default one process.
        lock_step: every rank must generate with the same number of forwards (ZeRO-3, and expert
            parallelism).
        quiet: no progress bar.
    """

    scorer: Scorer
    module: Any
    tokenizer: Any
    config: PretrainedConfig
    window: int
    batch_size: int = 8
    device: torch.device | str = "cpu"
    topology: Topology = field(default_factory=Topology)
    lock_step: bool = False
    quiet: bool = False

    def encode(self, text: str) -> Tokens:
        """Tokenize without special tokens.

        A special token's spelling is plain text, as in a prepared corpus.
        """
        # verbose=False: no warning about the length
        ids = self.tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )
        return np.array(ids, dtype=np.int64)

    def require_same_requests(self, requests: Iterable[bytes]) -> None:
        """Check that all ranks have the same requests. Collective.

        Files may differ between machines.

        Raises:
            UserError: on every rank.
        """
        if self.topology.world > 1:
            digest = hashlib.sha256()
            for request in requests:
                # The length first: "ab" + "c" and "a" + "bc" must differ.
                digest.update(len(request).to_bytes(8) + request)
            require_same_on_all_ranks(
                {"the requests of a task": f"SHA-256 {digest.hexdigest()[:12]}…"}
            )

    def map_batches(
        self, function: Callable[[T], R], batches: Sequence[T], size: Callable[[T], int], title: str
    ) -> list[R]:
        """Apply `function` to each batch on one DP rank. Collective.

        Every rank gets all results, in order.

        Args:
            size: returns the tokens of a batch, for the progress bar on rank 0's terminal.
            title: the bar's label.
        """
        ranks = self.topology.data
        rank = self.topology.data_rank
        results: list[R] = []
        # tqdm's None: show the bar on a terminal only. `sys.stderr` is redirected while lm-eval
        # runs.
        disable = True if self.quiet or self.topology.rank else None
        total = sum(map(size, batches))
        with tqdm(
            desc=title,
            total=total,
            unit=" tokens",
            unit_scale=True,
            disable=disable,
            leave=False,
            file=sys.__stderr__,
        ) as bar:
            # 5 batches on DP 2; rank 1 computes the last one once more and drops it:
            #
            #     round     0   1   2
            #     rank 0    0   2   4
            #     rank 1    1   3   (4)
            #
            # So all ranks run as many forwards: each gathers parameters under ZeRO-3, and sends
            # rows to experts under expert parallelism.
            for start in range(0, len(batches), ranks):
                result = function(batches[min(start + rank, len(batches) - 1)])
                if start + rank < len(batches):
                    results.append(result)
                bar.update(sum(map(size, batches[start : start + ranks])))
        if ranks == 1:
            return results
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, results, group=self.topology.data_group)
        return [gathered[index % ranks][index // ranks] for index in range(len(batches))]

    # inference_mode's tensors could not be used in training, and ZeRO-3 gathers parameters here
    @torch.no_grad()
    def score(self, rows: Sequence[Row], title: str = "") -> list[list[Score]]:
        """Return the scores of every row, in order, on every rank. Collective.

        A row has the score of its targets, then one for each alternative.

        Rows are sorted by length, longest first: less padding, and the first batch shows whether
        memory suffices.
        """
        self.require_same_requests(
            row.tokens.tobytes() + repr((row.scored, row.alternatives)).encode() for row in rows
        )
        # Before the batches go to ranks: the same rows are in a batch, and so padded to the same
        # length, with any DP size. That makes the sums equal bit for bit.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]))
        batches = [
            order[start : start + self.batch_size]
            for start in range(0, len(order), self.batch_size)
        ]
        scores = self.map_batches(
            lambda batch: self._score([rows[index] for index in batch]),
            batches,
            lambda batch: sum(len(rows[index]) for index in batch),
            title,
        )
        by_row = dict(
            zip(order, (row_scores for batch in scores for row_scores in batch), strict=True)
        )
        return [by_row[index] for index in range(len(rows))]

    def _score(self, rows: Sequence[Row]) -> list[list[Score]]:
        input_ids, labels = pad(rows)
        nll, greedy = self.scorer(input_ids.to(self.device), labels.to(self.device))
        # A row with alternatives has one scored target, so each column sums one label.
        # In fp64, because a window may have thousands of targets.
        sums = nll.double().sum(1).tolist()
        arg_max = (greedy | (labels == IGNORE_INDEX).to(greedy.device)).all(1).tolist()
        return [
            [Score(*score) for score in zip(sums[index], arg_max[index], strict=True)][
                : 1 + len(row.alternatives)
            ]
            for index, row in enumerate(rows)
        ]
