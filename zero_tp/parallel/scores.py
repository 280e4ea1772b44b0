"""What each target token costs and whether it is the model's first choice, with the vocabulary split over TP.

For evaluation, without gradients. Only the positions that have a target get logits, and the logits of one chunk at a
time are all that exists. Ranks exchange 2 + k numbers a position and never logits. v vocabulary, t TP size, h hidden,
n positions with a target, k alternatives.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero_tp.parallel import loss
from zero_tp.parallel.collectives import Group, all_gather, group_rank, group_size


class TokenScores(NamedTuple):
    """Of every target: its negative log-likelihood (fp32, nats) and whether it has the greatest logit (bool).

    Of tokens that share the greatest logit the one with the lowest id is the first choice, as for torch's argmax. Where
    nothing is scored they are 0 and False.
    """

    nll: Tensor
    greedy: Tensor


@torch.no_grad()
def vocab_parallel_token_scores(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocabulary: int, group: Group, ignore_index: int = -100
) -> TokenScores:
    """Scores of `labels` under softmax(`hidden` Wᵀ); equal on all TP ranks.

    All-gather over TP of 2 + k numbers for each position with a target, in fp32, and of a byte for each first choice.

    Args:
        hidden: [s, b, h], whole on every rank.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer; those past `vocabulary` get no probability.
        labels: [s, b], or [s, b, k]: k alternatives at each position. `ignore_index` where nothing is scored.

    Returns:
        Both of the shape of `labels`.
    """
    rows = weight.shape[0]
    first = group_rank(group) * rows
    valid = min(max(vocabulary - first, 0), rows)
    flat_labels = labels.reshape(hidden.shape[0] * hidden.shape[1], -1)  # [s·b, k]
    flat_hidden = hidden.flatten(0, 1)
    nll = torch.zeros(flat_labels.shape, dtype=torch.float32, device=hidden.device)
    greedy = torch.zeros(flat_labels.shape, dtype=torch.bool, device=hidden.device)
    positions = (flat_labels != ignore_index).any(1).nonzero().squeeze(1)
    for chunk in positions.split(max(1, loss.CHUNK_ELEMENTS // rows)):
        if not len(chunk):
            continue
        wanted = flat_labels[chunk]
        logits = loss.shard_logits(flat_hidden[chunk], weight, valid)
        nll[chunk], greedy[chunk] = _scores(logits, wanted, first, valid, group)
    scored = flat_labels != ignore_index
    return TokenScores(nll.where(scored, 0.0).view(labels.shape), (greedy & scored).view(labels.shape))


def _scores(logits: Tensor, labels: Tensor, first: int, valid: int, group: Group) -> TokenScores:
    """Of `labels` [n, k] under this rank's fp32 `logits` [n, v/t], whose first column is token `first`."""
    here = (labels >= first) & (labels < first + valid)
    own = logits.gather(1, (labels - first).clamp(0, logits.shape[1] - 1)).masked_fill(~here, 0.0)
    best = logits.amax(1)
    total = (logits - best.unsqueeze(1)).exp_().sum(1)
    parts = all_gather(torch.cat((best.unsqueeze(1), total.unsqueeze(1), own), 1).unsqueeze(0), group)  # [t, n, 2 + k]
    greatest = parts[..., 0].amax(0)
    whole = (parts[..., 1] * (parts[..., 0] - greatest).exp()).sum(0)
    of_labels = parts[..., 2:].sum(0)
    nll = whole.log().unsqueeze(1) - (of_labels - greatest.unsqueeze(1))
    greedy = of_labels == greatest.unsqueeze(1)
    row, alternative = greedy.nonzero(as_tuple=True)
    if len(row):
        # An earlier token with the same logit goes first. Finding the index of every maximum instead would take as long
        # as 5 % of the logits' GEMM (CPU, h 576).
        tokens = torch.arange(first, first + logits.shape[1], device=logits.device)
        equal = logits[row] == greatest[row].unsqueeze(1)
        earlier = (equal & (tokens < labels[row, alternative].unsqueeze(1))).any(1)
        if group_size(group) > 1:
            earlier = all_gather(earlier.to(torch.uint8).unsqueeze(0), group).bool().any(0)
        greedy[row, alternative] = ~earlier
    return TokenScores(nll, greedy)
