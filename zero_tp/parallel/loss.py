"""The output layer is fused with the cross entropy, split over the vocabulary, in blocks of the sequence.

Ranks exchange three numbers a token and never logits (arXiv 1909.08053, section 3), and the logits of one block at a
time are all that exists. s sequence, b batch, h hidden, v vocabulary, t TP size, n tokens of a block.

The gradient is formed in forward, block by block, while that block's probabilities exist; backward only scales it.
That costs no second logits GEMM, and the TP communication of the gradient happens once, in forward; the gradient of the
weight lives from there until backward. A block's logits become the difference of probabilities and targets in place,
in slices that a cache holds, and one GEMM for each gradient takes them whole.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.constants import IGNORE_INDEX
from zero_tp.parallel.collectives import Group, all_gather, all_reduce, group_rank, group_size, reduce_scatter
from zero_tp.parallel.elementwise import IN_PIECES, Elementwise
from zero_tp.parallel.layout import own_tokens

BLOCK_ELEMENTS = 2**23
"""Logits of one block on one rank, at least: 32 MiB in fp32."""
SLICE_ELEMENTS = 2**22
"""Logits that are in fp32 at a time on accelerators, where a kernel needs work for all its cores: 16 MiB."""
_FP32_SUMS = ("cuda", "xpu")
"""Devices whose GEMMs add the products of 16-bit tensors to one of fp32."""


def block_positions(sequence: int, batch: int, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the sequence positions of one block; at least one.

    A block has as many tokens as the weight [rows, columns] has columns, if that is more than `BLOCK_ELEMENTS`: its
    logits are no larger then than the scaled gradient of the weight, which backward makes when they are gone. Twice as
    many are one block in bf16, as the gradient of one block alone is not added up in fp32.

    Args:
        columns: 0 where the weight has no gradient, as in evaluation.
    """
    if dtype == torch.bfloat16 and sequence * batch <= 2 * columns:
        return sequence
    most = max(1, max(BLOCK_ELEMENTS // max(1, rows), columns) // batch)
    return math.ceil(sequence / math.ceil(sequence / most))


def nonzero(divisor: Tensor | float) -> Tensor | float:
    """Return what a sum of losses is divided by, 1 in the place of 0: the sum over no label is 0, its share too."""
    return divisor.masked_fill(divisor == 0, 1) if isinstance(divisor, Tensor) else divisor or 1


def adds_up(sequence: int, positions: int, dtype: torch.dtype) -> bool:
    """Tell whether the weight's gradient is added up in fp32: over several blocks, or in fp16, which holds no sums of
    many tokens."""
    return positions < sequence or dtype == torch.float16


def shard_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, valid: int) -> Tensor:
    """Return the logits in fp32, [n, h] × [v/t, h] → [n, v/t]; padded rows (from `valid` on) get no probability."""
    return _without_padding(F.linear(hidden, weight, bias).float(), valid)


def _without_padding(logits: Tensor, valid: int) -> Tensor:
    if valid < logits.shape[1]:
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

    def chosen_first(self, chosen: Tensor) -> Tensor:
        """Tell of which rows a rank's first choice is the whole vocabulary's: that of the first rank that has the
        greatest logit. [t, n, *], whether each rank's own is a label → [n, *]."""
        has_it = self.maxima == self.greatest
        first = has_it & (has_it.cumsum(0) == 1)
        return (first.view(*first.shape, *(1,) * (chosen.ndim - 2)) & chosen).any(0)


def exchange_softmax(maximum: Tensor, total: Tensor, others: Tensor, group: Group) -> Softmax:
    """Exchange maxima and sums over TP, so that every rank has the softmax of the whole vocabulary. One all-gather of
    [2 + m, n].

    Args:
        maximum: of each row of this rank's logits, [n].
        total: sum of exp(logit - maximum) over this rank's, [n].
        others: m more numbers of each row, [m, n].
    """
    parts = all_gather(torch.cat((torch.stack((maximum, total)), others)).unsqueeze(0), group)  # [t, 2 + m, n]
    maxima, totals = parts[:, 0], parts[:, 1]
    greatest = maxima.amax(0)
    return Softmax(maxima, greatest, (totals * (maxima - greatest).exp()).sum(0), parts[:, 2:])


def _sums(logits: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """Return each row's maximum and the sum of exp(logit - maximum), fp32 [n]."""
    wide = _without_padding(logits.float(), valid)
    maximum = wide.amax(1)
    return maximum, (wide - maximum.unsqueeze(1)).exp_().sum(1)


def _first_choices(logits: Tensor, valid: int) -> Tensor:
    """Return the first column of each row's maximum, [n]."""
    return _without_padding(logits.float(), valid).argmax(1)


def _probabilities(logits: Tensor, maximum: Tensor, factor: Tensor, valid: int) -> Tensor:
    """Return exp(logit - maximum) · factor, fp32 [n, v/t]."""
    return (_without_padding(logits.float(), valid) - maximum.unsqueeze(1)).exp_().mul_(factor.unsqueeze(1))


def _to_probabilities_(logits: Tensor, maximum: Tensor, factor: Tensor, valid: int) -> None:
    logits.copy_(_probabilities(logits, maximum, factor, valid))


def _log_probability(
    logits: Tensor, target: Tensor, valid: int, group: Group, run: Elementwise, choosing: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the log-probability of the target [n]; each row's maximum on this rank [n], and what exp(logit - maximum)
    times is the probability [n]; when `choosing`, whether the target is the first choice [n].

    `target` [n] is this rank's row, -1 where another rank holds it. The maximum is taken off before the logarithm of
    the sum: adding the two first would round the loss to the maximum's last digit.
    """
    at_target = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1).float().masked_fill(target < 0, 0.0)
    maximum, total = run.rows(_sums, (logits,), valid, elsewhere=SLICE_ELEMENTS)
    others = at_target.unsqueeze(0)
    if choosing:
        chosen = run.rows(_first_choices, (logits,), valid, elsewhere=SLICE_ELEMENTS) == target
        others = torch.stack((at_target, chosen.float()))
    softmax = exchange_softmax(maximum, total, others, group)
    log_probability = softmax.others[:, 0].sum(0) - softmax.greatest - softmax.total.log()
    right = softmax.chosen_first(softmax.others[:, 1] == 1) if choosing else None
    return log_probability, maximum, (maximum - softmax.greatest).exp() / softmax.total, right


def _differences_(
    logits: Tensor, target: Tensor, valid: int, maximum: Tensor, factor: Tensor, run: Elementwise
) -> None:
    """Turn `logits` [n, v/t] into probability - target in place, each rounded once.

    Divided by the number of tokens here, every target would be rounded the same way: a bias of up to 0.4 % in bf16.
    """
    column = target.clamp(min=0).unsqueeze(1)
    at_target = _probabilities(logits.gather(1, column), maximum, factor, valid) - (target >= 0).float().unsqueeze(1)
    run.rows(_to_probabilities_, (logits, maximum, factor), valid, elsewhere=SLICE_ELEMENTS)
    # `scatter_` would copy all logits twice on a CPU.
    logits[torch.arange(len(logits), device=logits.device), column.squeeze(1)] = at_target.squeeze(1).to(logits.dtype)


def _add_product_(total: Tensor, first: Tensor, second: Tensor, run: Elementwise = IN_PIECES) -> None:
    """Add firstᵀ · second to `total`, which is in fp32. [n, v/t], [n, h] → [v/t, h].

    Where the GEMM cannot add to fp32, a bf16 product is rounded first. One of fp16 is made in fp32: a sum of many
    tokens can be more than fp16 holds, whatever the loss scale, which comes after it.
    """
    if first.dtype == torch.float32:
        total.addmm_(first.t(), second)
        return
    if total.device.type in _FP32_SUMS:
        torch.addmm(total, first.t(), second, out_dtype=torch.float32, out=total)
        return
    half = first.dtype == torch.float16
    second = second.float() if half else second
    step = max(1, BLOCK_ELEMENTS // second.shape[1])
    for start in run.starts(first.shape[1], step):
        rows = slice(start, start + step)
        if half:
            total[rows].addmm_(first[:, rows].t().float(), second)
        else:
            total[rows].add_(first[:, rows].t() @ second)  # `+=` would copy the rows to where they are


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
        bias: Tensor | None,
        labels: Tensor,
        vocabulary: int,
        ignore: int,
        group: Group,
        sequence: bool,
        divisor: Tensor | float | None,
        choosing: bool,
        differentiate: bool,
        run: Elementwise,
    ) -> tuple[Tensor, Tensor]:
        if sequence:
            hidden = all_gather(hidden, group)
        length, batch, _ = hidden.shape
        first, valid = own_tokens(vocabulary, group_rank(group), group_size(group))
        needs = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        needs_hidden, needs_weight, needs_bias = needs
        counted = labels != ignore
        divisor = counted.sum() if divisor is None else nonzero(divisor)
        if not isinstance(divisor, Tensor):
            divisor = hidden.new_full((), divisor, dtype=torch.float32)
        count = divisor.to(hidden.device, torch.float32)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        right = torch.zeros((), dtype=torch.float32, device=hidden.device)
        # Contiguous whatever the layout of `hidden`: each block is written through a flattened view.
        hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        weight_gradient = None
        rows, columns = weight.shape
        bias_gradient = torch.zeros(rows, dtype=torch.float32, device=hidden.device) if needs_bias else None
        step = block_positions(length, batch, rows, columns if needs_weight else 0, weight.dtype)
        if needs_weight and adds_up(length, step, weight.dtype):
            weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in run.starts(length, step):
            keep = counted[start : start + step].flatten()
            # What is ignored is 0 from here on, whatever it was.
            piece = hidden[start : start + step].flatten(0, 1).masked_fill(~keep.unsqueeze(1), 0.0)
            target = labels[start : start + step].flatten() - first
            target = target.masked_fill(~keep | (target < 0) | (target >= valid), -1)
            logits = F.linear(piece, weight, bias)
            log_probability, maximum, factor, chosen = _log_probability(logits, target, valid, group, run, choosing)
            loss -= log_probability.masked_fill(~keep, 0.0).sum()
            if chosen is not None:
                right += (chosen & keep).sum()
            if any(needs):
                _differences_(logits, target, valid, maximum, factor.masked_fill(~keep, 0.0), run)
            if hidden_gradient is not None:
                torch.matmul(logits, weight, out=hidden_gradient[start : start + step].flatten(0, 1))
            if bias_gradient is not None:
                bias_gradient += logits.sum(0, dtype=torch.float32)
            if weight_gradient is not None:
                _add_product_(weight_gradient, logits, piece, run)
            elif needs_weight:
                weight_gradient = logits.t() @ piece
            del logits  # before the next block's are made
        if hidden_gradient is not None and group_size(group) > 1:
            leave = reduce_scatter if sequence else all_reduce
            hidden_gradient = leave(hidden_gradient, group)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient, count)
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(right)
        return loss / count, right

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, bias_gradient, count = ctx.saved_tensors
        # The mean over no token is 0/0 = nan and its gradient zero, as in torch.
        scale = gradient.float() / count.masked_fill(count == 0, 1.0)
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            _scaled(hidden_gradient, scale, hidden_dtype),
            _scaled(weight_gradient, scale, weight_dtype),
            _scaled(bias_gradient, scale, weight_dtype),
            *(None,) * 9,
        )


def vocab_parallel_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    vocabulary: int,
    group: Group,
    sequence: bool = False,
    ignore_index: int = IGNORE_INDEX,
    divisor: Tensor | float | None = None,
    run: Elementwise = IN_PIECES,
) -> Tensor:
    """Return the mean cross entropy of `hidden` Wᵀ + `bias` against `labels`, over the tokens that are not ignored.

    Forward over TP: all-gather of the hidden states under SP, one all-gather of 3 numbers a token, and all-reduce
    (reduce-scatter under SP) of the hidden gradient when one is needed. Backward: none.

    Args:
        hidden: [s, b, h], or a sequence shard [s/t, b, h] when `sequence`.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer.
        labels: whole [s, b], each the token that its position predicts, or `ignore_index`.
        bias: this rank's [⌈v/t⌉] of the output layer's, if it has one.
        vocabulary: v; rows past it get no probability and no gradient.
        divisor: of the sum of the losses, instead of the number of labels that are not ignored; a tensor of no
            dimension keeps the host from waiting for it.
        run: of the softmax, and which blocks there are.

    Returns:
        fp32 scalar, equal on all TP ranks; nan when every label is ignored, as torch's cross entropy gives, but 0 with
        a `divisor`, also of 0.
    """
    given = (vocabulary, ignore_index, group, sequence, divisor, False, torch.is_grad_enabled(), run)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, *given)[0]
    return loss


def vocab_parallel_loss_and_choices(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    vocabulary: int,
    group: Group,
    divisor: Tensor | float | None = None,
    run: Elementwise = IN_PIECES,
) -> tuple[Tensor, Tensor]:
    """Return what `vocab_parallel_cross_entropy` does of whole hidden states, and the number of labels that are the
    model's first choice, fp32 without gradient.

    That takes another pass over the logits and one number more a token in the all-gather.
    """
    given = (vocabulary, IGNORE_INDEX, group, False, divisor, True, torch.is_grad_enabled(), run)
    loss, right = _LinearCrossEntropy.apply(hidden, weight, bias, labels, *given)
    return loss, right


def vocab_parallel_logits(
    hidden: Tensor, weight: Tensor, *, bias: Tensor | None = None, vocabulary: int, group: Group
) -> Tensor:
    """Return the whole logits on every TP rank. [s, b, h] → [s, b, v]; all-gather over TP, no gradient through it."""
    local = F.linear(hidden, weight, bias).detach()
    if group_size(group) == 1:
        return local[..., :vocabulary]
    gathered = all_gather(local.unsqueeze(0), group)  # [t, s, b, v/t]
    return gathered.movedim(0, 2).flatten(2, 3)[..., :vocabulary]
