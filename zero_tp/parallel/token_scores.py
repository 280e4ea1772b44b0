"""Score target tokens for evaluation, with the vocabulary split over TP.

A score is a token's loss, and whether the token is the argmax.

Only positions with a target get logits, one chunk at a time. Ranks exchange 2 + 2k numbers a
position and never logits. v vocabulary, t TP size, h hidden, n positions with a target, k
alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.parallel import loss
from zero_tp.parallel.collectives import Group, group_rank, group_size
from zero_tp.parallel.layout import vocab_shard_range
from zero_tp.parallel.logits import (
    LogitMap,
    all_gather_statistics,
    shard_logits,
    softmax_of,
)


class TokenScores(NamedTuple):
    """Negative log-likelihood of every target (fp32, nats), and whether its logit is the greatest
    (bool).

    Ties go to the lowest token id, as in torch's argmax. Ignored targets have 0 and False.
    """

    nll: Tensor
    greedy: Tensor


@torch.no_grad()
def vocab_parallel_token_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocabulary: int,
    group: Group,
    ignore_index: int = IGNORE_INDEX,
    logit_map: LogitMap = LogitMap(),  # noqa: B008 (immutable)
) -> TokenScores:
    """Return the scores of `labels` under softmax(`hidden` Wᵀ + `bias`); equal on all TP ranks.

    One all-gather over TP of 2 + 2k numbers for each position with a target, in fp32.

    Args:
        hidden: [s, b, h], whole on every rank.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer; those past `vocabulary` get no
            probability.
        logit_map: function of each logit.
        labels: [s, b], or [s, b, k]: k alternatives at each position; `ignore_index` is not scored.

    Returns:
        Both of the shape of `labels`.
    """
    rows = weight.shape[0]
    first, valid = vocab_shard_range(vocabulary, group_rank(group), group_size(group))
    flat_labels = labels.reshape(hidden.shape[0] * hidden.shape[1], -1)  # [s·b, k]
    flat_hidden = hidden.flatten(0, 1)
    nll = torch.zeros(flat_labels.shape, dtype=torch.float32, device=hidden.device)
    greedy = torch.zeros(flat_labels.shape, dtype=torch.bool, device=hidden.device)
    # Every rank has the same labels, so all of them run the same number of gathers.
    positions = (flat_labels != ignore_index).any(1).nonzero().squeeze(1)
    for chunk in positions.split(max(1, loss.BLOCK_ELEMENTS // rows)):
        # Splitting an empty tensor gives one empty chunk.
        if not len(chunk):
            continue
        logits = shard_logits(flat_hidden[chunk], weight, bias, valid, logit_map)
        nll[chunk], greedy[chunk] = scores_of_logits(
            logits, flat_labels[chunk], first=first, valid=valid, group=group
        )
    scored = flat_labels != ignore_index
    return TokenScores(
        nll.where(scored, 0.0).view(labels.shape), (greedy & scored).view(labels.shape)
    )


def scores_of_logits(
    logits: Tensor, labels: Tensor, *, first: int = 0, valid: int | None = None, group: Group = None
) -> TokenScores:
    """Return the scores [n, k] of `labels` [n, k] under this rank's fp32 `logits` [n, v/t], which
    it overwrites.

    Scores of labels below 0 are undefined.

    Args:
        first: the token of the first column.
        valid: number of columns that are tokens; by default all.
    """
    valid = logits.shape[1] if valid is None else valid
    here = (labels >= first) & (labels < first + valid)
    # A label of another rank reads any column of this one, and is masked: the sum over ranks is its
    # logit.
    label_logits = logits.gather(1, (labels - first).clamp(0, logits.shape[1] - 1)).masked_fill(
        ~here, 0.0
    )
    best = logits.amax(1)
    # Argmax only for rows whose label has the maximum; all rows would take 5 % of the logits' time
    # (CPU, h 576).
    row, alternative = (here & (label_logits == best.unsqueeze(1))).nonzero(as_tuple=True)
    is_local_argmax = torch.zeros_like(label_logits)
    is_local_argmax[row, alternative] = (
        logits[row].argmax(1) + first == labels[row, alternative]
    ).to(logits.dtype)
    total = logits.sub_(best.unsqueeze(1)).exp_().sum(1)
    # Truth values travel as fp32 numbers, in the same all-gather as the logits.
    extra = torch.cat((label_logits, is_local_argmax), 1).unbind(1)
    softmax = softmax_of(all_gather_statistics(best, total, extra, group))
    # `extra` is [t, 2k, n].
    logits_by_rank, argmax_by_rank = softmax.extra.transpose(1, 2).chunk(2, 2)  # each [t, n, k]
    # The greatest logit is subtracted from the label's before the logarithm is added: large logits
    # would round the small loss away.
    nll = softmax.total.log().unsqueeze(1) - (logits_by_rank.sum(0) - softmax.greatest.unsqueeze(1))
    return TokenScores(nll, softmax.is_argmax(argmax_by_rank == 1))
