"""The output layer is fused with the cross entropy, split over the vocabulary, in chunks of the sequence.

Ranks exchange three numbers a token and never logits (arXiv 1909.08053, section 3), and the logits of one chunk at a
time are all that exists. s sequence, b batch, h hidden, v vocabulary, t TP size, n tokens of a chunk.

The gradient is formed in forward, chunk by chunk, while that chunk's probabilities exist; backward only scales it.
That costs no second logits GEMM, and the TP communication of the gradient happens once, in forward; the fp32 gradient
of the weight, 4·h·v/t bytes, lives from there until backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX
from zero_tp.parallel.collectives import Group, all_gather, all_reduce, group_rank, group_size, reduce_scatter
from zero_tp.parallel.layout import own_tokens

CHUNK_ELEMENTS = 2**23
"""Logits of one chunk on one rank: 32 MiB in fp32."""


def _chunk_rows(sequence: int, batch: int, vocabulary_shard: int) -> int:
    """Return the sequence positions of one chunk; at least one."""
    return max(1, min(sequence, CHUNK_ELEMENTS // max(1, batch * vocabulary_shard)))


def shard_logits(hidden: Tensor, weight: Tensor, valid: int) -> Tensor:
    """Return the logits in fp32, [n, h] × [v/t, h] → [n, v/t]; padded rows (from `valid` on) get no probability."""
    logits = (hidden @ weight.t()).float()
    if valid < weight.shape[0]:
        logits[:, valid:] = torch.finfo(torch.float32).min
    return logits


class Softmax(NamedTuple):
    """A softmax over the whole vocabulary needs these numbers of all t ranks.

    Attributes:
        maxima: each rank's greatest logit, [t, n]. greatest: of all of them, [n].
        total: sum of exp(logit - greatest) over the vocabulary, [n].
        others: what else was exchanged, [t, m, n].
    """

    maxima: Tensor
    greatest: Tensor
    total: Tensor
    others: Tensor


def exchange_softmax_(logits: Tensor, maximum: Tensor, others: Tensor, group: Group) -> Softmax:
    """Exchange maxima and sums over TP, so that every rank has the softmax of the whole vocabulary. One all-gather of
    [2 + m, n].

    Args:
        logits: this rank's, [n, v/t]; they become exp(logit - maximum) in place.
        maximum: of each row, [n].
        others: m more numbers of each row, [m, n].
    """
    total = logits.sub_(maximum.unsqueeze(1)).exp_().sum(1)
    parts = all_gather(torch.cat((torch.stack((maximum, total)), others)).unsqueeze(0), group)  # [t, 2 + m, n]
    maxima, totals = parts[:, 0], parts[:, 1]
    greatest = maxima.amax(0)
    return Softmax(maxima, greatest, (totals * (maxima - greatest).exp()).sum(0), parts[:, 2:])


def _log_probability_(logits: Tensor, target: Tensor, group: Group) -> Tensor:
    """Return the log-probability of the target [n]; `logits` become this rank's probabilities in place.

    `target` [n] is this rank's row, -1 where another rank holds it. The maximum is taken off before the logarithm of
    the sum: adding the two first would round the loss to the maximum's last digit.
    """
    here = target >= 0
    at_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
    maximum = logits.amax(1)
    softmax = exchange_softmax_(logits, maximum, at_target.unsqueeze(0), group)
    logits.mul_(((maximum - softmax.greatest).exp() / softmax.total).unsqueeze(1))
    return softmax.others[:, 0].sum(0) - softmax.greatest - softmax.total.log()


def _scaled(tensor: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return tensor · scale, rounded once to `dtype`.

    A scale rounded to bf16 first would bias every gradient by 0.4 %.
    """
    if tensor is None:
        return None
    # A scale of one dimension keeps the product in fp32; one of none would take the tensor's dtype.
    return torch.mul(tensor, scale.reshape(1), out=torch.empty_like(tensor, dtype=dtype))


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
        divisor: float | None,
        differentiate: bool,
    ) -> Tensor:
        if sequence:
            hidden = all_gather(hidden, group)
        length, batch, _ = hidden.shape
        rows = weight.shape[0]
        first, valid = own_tokens(vocabulary, group_rank(group), group_size(group))
        needs_hidden, needs_weight = (differentiate and needed for needed in ctx.needs_input_grad[:2])
        counted = labels != ignore
        count = counted.sum().float()
        if divisor is not None:
            count = torch.full_like(count, divisor)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Contiguous whatever the layout of `hidden`: each chunk is written through a flattened view.
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        # Chunks add up in fp32 whatever the weight's dtype.
        weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        step = _chunk_rows(length, batch, rows)
        for start in range(0, length, step):
            piece = hidden[start : start + step].flatten(0, 1)
            keep = counted[start : start + step].flatten()
            target = labels[start : start + step].flatten() - first
            target = target.masked_fill(~keep | (target < 0) | (target >= valid), -1)
            probability = shard_logits(piece, weight, valid)
            log_probability = _log_probability_(probability, target, group)
            loss -= log_probability.masked_fill(~keep, 0.0).sum()
            if not (needs_hidden or needs_weight):
                continue
            ones = (target >= 0).to(probability.dtype).neg_().unsqueeze(1)
            probability.scatter_add_(1, target.clamp(min=0).unsqueeze(1), ones)
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
        ctx.save_for_backward(hidden_gradient, weight_gradient, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss / count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, count = ctx.saved_tensors
        # With no counted token the loss is 0/0 = nan and the gradient zero, as in torch.
        scale = gradient.float() / count.masked_fill(count == 0, 1.0)
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            _scaled(hidden_gradient, scale, hidden_dtype),
            _scaled(weight_gradient, scale, weight_dtype),
            *(None,) * 7,
        )


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocabulary: int,
    group: Group,
    sequence: bool = False,
    ignore_index: int = IGNORE_INDEX,
    divisor: float | None = None,
) -> Tensor:
    """Return the mean cross entropy of `hidden` Wᵀ against `labels`, over the tokens that are not ignored.

    Forward over TP: all-gather of the hidden states under SP, one all-gather of 3 numbers a token, and all-reduce
    (reduce-scatter under SP) of the hidden gradient when one is needed. Backward: none.

    Args:
        hidden: [s, b, h], or a sequence shard [s/t, b, h] when `sequence`.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer.
        labels: whole [s, b], each the token that its position predicts, or `ignore_index`.
        vocabulary: v; rows past it get no probability and no gradient.
        divisor: of the sum of the losses, instead of the number of labels that are not ignored.

    Returns:
        fp32 scalar, equal on all TP ranks; nan when every label is ignored, as torch's cross entropy gives, but 0 with
        a `divisor`.
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, vocabulary, ignore_index, group, sequence, divisor, torch.is_grad_enabled()
    )


def vocab_parallel_logits(hidden: Tensor, weight: Tensor, *, vocabulary: int, group: Group) -> Tensor:
    """Return the whole logits on every TP rank. [s, b, h] → [s, b, v]; all-gather over TP, no gradient through it."""
    local = F.linear(hidden, weight).detach()
    if group_size(group) == 1:
        return local[..., :vocabulary]
    gathered = all_gather(local.unsqueeze(0), group)  # [t, s, b, v/t]
    return gathered.movedim(0, 2).flatten(2, 3)[..., :vocabulary]
