"""The output layer fused with the cross entropy, split over the vocabulary, in chunks of the sequence.

Ranks exchange three numbers a token and never logits (arXiv 1909.08053, section 3), and the logits of one chunk at a
time are all that exists. s sequence, b batch, h hidden, v vocabulary, t TP size, n tokens of a chunk.

The gradient is formed in forward, chunk by chunk, while that chunk's probabilities exist; backward only scales it.
That costs no second logits GEMM, and the TP communication of the gradient happens once, in forward; the fp32 gradient
of the weight, 4·h·v/t bytes, lives from there until backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.parallel.collectives import Group, all_gather, all_reduce, group_rank, group_size, reduce_scatter

CHUNK_ELEMENTS = 2**23
"""Logits of one chunk on one rank: 32 MiB in fp32."""


def _chunk_rows(sequence: int, batch: int, vocabulary_shard: int) -> int:
    """Sequence positions of one chunk; at least one."""
    return max(1, min(sequence, CHUNK_ELEMENTS // max(1, batch * vocabulary_shard)))


def _logits(hidden: Tensor, weight: Tensor, valid: int) -> Tensor:
    """[n, h] × [v/t, h] → fp32 [n, v/t]; padded rows (from `valid` on) get no probability."""
    logits = (hidden @ weight.t()).float()
    if valid < weight.shape[0]:
        logits[:, valid:] = torch.finfo(torch.float32).min
    return logits


def _log_normaliser(logits: Tensor, target: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """(log Σ exp over the whole vocabulary, log-probability of the target), each [n]; `logits` become exp(x - max).

    One all-gather of [3, n] over TP: maximum, sum and the target's logit. `target` [n] is this rank's row, -1 where
    another rank holds it.
    """
    here = target >= 0
    at_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    maximum = logits.amax(1)
    total = logits.sub_(maximum.unsqueeze(1)).exp_().sum(1)
    parts = all_gather(torch.stack((maximum, total, at_target)).unsqueeze(0), group)  # [t, 3, n]
    greatest = parts[:, 0].amax(0)
    normaliser = greatest + (parts[:, 1] * (parts[:, 0] - greatest).exp()).sum(0).log()
    logits.mul_((maximum - normaliser).exp().unsqueeze(1))  # the probabilities
    return normaliser, parts[:, 2].sum(0) - normaliser


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary: int,
        ignore: int,
        group: Group,
        sequence: bool,
        differentiate: bool,
    ) -> Tensor:
        if sequence:
            hidden = all_gather(hidden, group)
        length, batch, _ = hidden.shape
        rows = weight.shape[0]
        first = group_rank(group) * rows
        valid = min(max(vocabulary - first, 0), rows)
        needs_hidden, needs_weight = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        counted = labels != ignore
        # The mean over counted tokens; with none it is 0/0 = nan, as in torch.
        share = 1.0 / counted.sum().float()
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if needs_hidden else None
        # Chunks add up in fp32 whatever the weight's dtype.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        step = _chunk_rows(length, batch, rows)
        for start in range(0, length, step):
            piece = hidden[start : start + step].flatten(0, 1)
            keep = counted[start : start + step].flatten()
            target = labels[start : start + step].flatten() - first
            target = target.masked_fill(~keep | (target < 0) | (target >= valid), -1)
            probability = _logits(piece, weight, valid)
            _, log_probability = _log_normaliser(probability, target, group)
            loss -= log_probability.masked_fill(~keep, 0.0).sum()
            if not (needs_hidden or needs_weight):
                continue
            here = target >= 0
            probability[here.nonzero().squeeze(1), target[here]] -= 1.0
            probability.masked_fill_(~keep.unsqueeze(1), 0.0)
            difference = probability.to(hidden.dtype)
            if hidden_gradient is not None:
                torch.matmul(difference, weight, out=hidden_gradient[start : start + step].flatten(0, 1))
            if weight_gradient is not None:
                if weight.dtype == torch.float32:
                    weight_gradient.addmm_(difference.t(), piece)
                else:
                    weight_gradient += difference.t() @ piece
        if hidden_gradient is not None and group_size(group) > 1:
            leave = reduce_scatter if sequence else all_reduce
            hidden_gradient = leave(hidden_gradient, group)
        ctx.save_for_backward(hidden_gradient, weight_gradient, share)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss * share

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, share = ctx.saved_tensors
        scale = gradient.float() * share
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient * scale.to(hidden_gradient.dtype)
        if weight_gradient is not None:
            weight_gradient = (weight_gradient * scale).to(ctx.dtypes[1])
        return hidden_gradient, weight_gradient, None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: int,
    group: Group,
    sequence: bool = False,
    ignore_index: int = -100,
) -> Tensor:
    """Mean cross entropy of `hidden` Wᵀ against `labels`, over the tokens that are not ignored.

    Forward over TP: all-gather of the hidden states under SP, one all-gather of 3 numbers a token, and all-reduce
    (reduce-scatter under SP) of the hidden gradient when one is needed. Backward: none.

    Args:
        hidden: [s, b, h], or a sequence shard [s/t, b, h] when `sequence`.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer.
        labels: whole [s, b], each the token that its position predicts, or `ignore_index`.
        vocabulary: v; rows past it get no probability and no gradient.

    Returns:
        fp32 scalar, equal on all TP ranks; nan when every label is ignored, as torch's cross entropy gives.
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, vocabulary, ignore_index, group, sequence, torch.is_grad_enabled()
    )


@torch.no_grad()
def vocab_parallel_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, vocabulary: int, group: Group, ignore_index: int = -100
) -> Tensor:
    """Each token's loss, for evaluation. [s, b, h], labels [s, b] → fp32 [s, b], 0 where ignored."""
    rows = weight.shape[0]
    first = group_rank(group) * rows
    valid = min(max(vocabulary - first, 0), rows)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
    step = _chunk_rows(hidden.shape[0], hidden.shape[1], rows)
    for start in range(0, hidden.shape[0], step):
        chunk = labels[start : start + step]
        target = chunk.flatten() - first
        target = target.masked_fill((chunk.flatten() == ignore_index) | (target < 0) | (target >= valid), -1)
        _, log_probability = _log_normaliser(_logits(hidden[start : start + step].flatten(0, 1), weight, valid), target, group)
        losses[start : start + step] = -log_probability.view(chunk.shape)
    return losses.masked_fill(labels == ignore_index, 0.0)


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, *, vocabulary: int, group: Group) -> Tensor:
    """The whole logits on every TP rank. [s, b, h] → [s, b, v]; all-gather over TP, no gradient through it."""
    local = F.linear(hidden, weight).detach()
    if group_size(group) == 1:
        return local[..., :vocabulary]
    gathered = all_gather(local.unsqueeze(0), group)  # [t, s, b, v/t]
    return gathered.movedim(0, 2).flatten(2, 3)[..., :vocabulary]
