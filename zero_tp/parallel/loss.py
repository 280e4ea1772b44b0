"""Output layer fused with cross entropy, split over the vocabulary, computed in blocks of the
sequence.

Ranks exchange three numbers a token and never logits (arXiv 1909.08053, section 3); only one
block's logits exist at a time. s sequence, b batch, h hidden, v vocabulary, t TP size, n tokens of
a block.

Forward computes the gradients too, block by block; backward only scales them. That saves a second
logits GEMM, and the gradient's TP communication happens once, in forward. The weight's gradient
lives from forward until backward. A block's logits become probability - target in place, in slices
that fit a cache, before one GEMM for each gradient. For x = hidden Wᵀ, one row and its label y:

    loss      -log p_y        with p_j = exp(x_j) / Σ exp(x), summed over all ranks' columns
    d/dx      p - e_y         in the place of x; e_y is 1 at column y, on the rank that has it
    d/dh      (p - e_y) W     a part on each rank, so it is summed over TP
    d/dW      (p - e_y)ᵀ h    this rank's rows only: nothing is sent

A z-loss (arXiv 2204.02311, section 5) adds z · log²(Σ exp(x)), whose gradient is a factor of p:

    d/dx      p (1 + 2 z log Σ exp(x)) - e_y
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zero_tp.base.constants import IGNORE_INDEX
from zero_tp.parallel.collectives import (
    Group,
    all_gather,
    all_reduce,
    group_rank,
    group_size,
    reduce_scatter,
)
from zero_tp.parallel.elementwise import CHUNKED, ElementwiseOps
from zero_tp.parallel.layout import vocab_shard_range
from zero_tp.parallel.logits import (
    SLICE_ELEMENTS,
    LogitMap,
    all_gather_statistics,
    map_logits_,
    mask_padding_,
    softmax_of,
)

BLOCK_ELEMENTS = 2**23
"""Logits of one block on one rank, 32 MiB in fp32; a larger weight allows more
(`block_positions`).
"""
_FP32_SUMS = ("cuda", "xpu")
"""Devices whose GEMMs accumulate products of 16-bit tensors in an fp32 tensor."""


def block_positions(sequence: int, batch: int, rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the sequence positions of one block; at least one.

    A block has at most `BLOCK_ELEMENTS` logits, or as many as the weight [rows, columns] has
    elements if that is more: its gradient beside them takes as much. In bf16 up to 2 · columns
    tokens are one block, because a single block's gradient needs no fp32 accumulation.

    Args:
        columns: 0 if the weight has no gradient, as in evaluation.
    """
    if dtype == torch.bfloat16 and sequence * batch <= 2 * columns:
        return sequence
    # Blocks of nearly equal length: 9 positions with a limit of 4 are 3 + 3 + 3 and not 4 + 4 + 1,
    # whose last GEMM would be too small to be fast.
    limit = max(1, max(BLOCK_ELEMENTS // max(1, rows), columns) // batch)
    return math.ceil(sequence / math.ceil(sequence / limit))


def nonzero_divisor(divisor: Tensor | float) -> Tensor | float:
    """Return the divisor of a sum of losses, with 1 instead of 0.

    So the mean over no label is 0.
    """
    return divisor.masked_fill(divisor == 0, 1) if isinstance(divisor, Tensor) else divisor or 1


def accumulates_in_fp32(sequence: int, positions: int, dtype: torch.dtype) -> bool:
    """Return whether the weight's gradient accumulates in fp32: over several blocks, or if fp16
    could overflow.
    """
    return positions < sequence or dtype == torch.float16


class TokenLoss(NamedTuple):
    """The loss of a batch's labels, fp32 scalars that are equal on all TP ranks.

    Attributes:
        loss: what training minimises: cross_entropy + z_loss times its weight.
        correct: the number of labels that are the argmax; 0 if it was not counted.
        cross_entropy: without a weight of the z-loss it is `loss`, else without gradient.
        z_loss: mean of the squared log-sum-exp, without gradient; None without a weight.
    """

    loss: Tensor
    correct: Tensor
    cross_entropy: Tensor
    z_loss: Tensor | None


class _Sums:
    """Sums over the counted labels of all blocks, fp32 scalars that each block adds to.

    Attributes:
        squares: of the log-sum-exp; None without a weight of the z-loss.
    """

    def __init__(self, device: torch.device, z_loss_weight: float):
        self.entropy = torch.zeros((), dtype=torch.float32, device=device)
        self.correct = torch.zeros_like(self.entropy)
        self.squares = torch.zeros_like(self.entropy) if z_loss_weight else None
        self.z_loss_weight = z_loss_weight

    def tensors(self, accuracy: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return what a block adds to: entropy, correct if `accuracy`, and squares."""
        return self.entropy, self.correct if accuracy else None, self.squares

    def outputs(self, denominator: Tensor) -> tuple[Tensor, ...]:
        """Return the fields of `TokenLoss`; the first two without a z-loss."""
        mean = self.entropy / denominator
        if self.squares is None:
            return mean, self.correct
        total = self.entropy + self.z_loss_weight * self.squares
        return total / denominator, self.correct, mean, self.squares / denominator


def _max_and_sum_exp_(logits: Tensor, maximum: Tensor, total: Tensor, valid: int) -> None:
    """Write each row's maximum and the sum of exp(logit - maximum), fp32 [n]."""
    wide = mask_padding_(logits.float(), valid)
    torch.amax(wide, 1, out=maximum)
    torch.sum((wide - maximum.unsqueeze(1)).exp_(), 1, out=total)


def _argmax(logits: Tensor, valid: int) -> Tensor:
    """Return the first column of each row's maximum, [n]."""
    return mask_padding_(logits.float(), valid).argmax(1)


def _probabilities(logits: Tensor, maximum: Tensor, factor: Tensor, valid: int) -> Tensor:
    """Return exp(logit - maximum) · factor, fp32 [n, v/t]."""
    return (
        (mask_padding_(logits.float(), valid) - maximum.unsqueeze(1))
        .exp_()
        .mul_(factor.unsqueeze(1))
    )


def _to_probabilities_(
    logits: Tensor, maximum: Tensor, factor: Tensor, valid: int, logit_map: LogitMap
) -> None:
    """Overwrite mapped logits by their probabilities, times the map's slope."""
    gradient = _probabilities(logits, maximum, factor, valid)
    if logit_map != LogitMap():
        gradient.mul_(logit_map.slope(logits.float()))
    logits.copy_(gradient)


def _target_logits(column: Tensor, is_absent: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's logit at its column, [n, 1], and the target's in fp32, [n].

    The target's is 0 on all ranks but one, so the gathered ones add up to it.
    """
    own = logits.gather(1, column.unsqueeze(1))
    return own, own.squeeze(1).float().masked_fill(is_absent, 0.0)


def _all_gather_rows(
    logits: Tensor,
    column: Tensor,
    is_absent: Tensor,
    valid: int,
    group: Group,
    ops: ElementwiseOps,
    accuracy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's maximum on this rank, its logit at its column, and all ranks' statistics,
    [n, t, 3]; a fourth of them with `accuracy`: whether the target is the rank's argmax.
    """
    # The maximum is subtracted so that exp cannot overflow in fp32, which ends at exp(88.7).
    maximum, total = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    rows = (logits, maximum, total)
    ops.map_rows(_max_and_sum_exp_, rows, valid, accelerator_elements=SLICE_ELEMENTS)
    own, target_logit = ops.map_rows(_target_logits, (column, is_absent, logits))
    extra = [target_logit]
    if accuracy:
        argmax = ops.map_rows(_argmax, (logits,), valid, accelerator_elements=SLICE_ELEMENTS)
        extra.append((argmax == column).float().masked_fill(is_absent, 0.0))
    return maximum, own, all_gather_statistics(maximum, total, extra, group).movedim(2, 0)


def _add_rows_(
    is_ignored: Tensor,
    is_absent: Tensor,
    maximum: Tensor,
    own: Tensor,
    statistics: Tensor,
    entropy: Tensor,
    correct: Tensor | None,
    squares: Tensor | None,
    z_loss_weight: float,
    valid: int,
    logit_map: LogitMap,
    differentiate: bool,
) -> tuple[Tensor, Tensor] | None:
    """Add a block's rows to the sums; return what `_to_logit_gradients_` needs, if it will run.

    It is the factor of exp(logit - maximum) in the gradient of a row's logits, 0 in ignored rows,
    and the gradient of the logit at the row's column, both [n]. The z-loss's gradient is
    2 z log Σ exp(logit) times the probability.

    Args:
        statistics: all ranks', [n, t, 2 + m].
    """
    softmax = softmax_of(statistics.movedim(0, 2))
    log_total = softmax.total.log()
    # Adding the maximum to the logarithm first would round the loss to the maximum's last digit.
    log_probability = softmax.extra[:, 0].sum(0) - softmax.greatest - log_total
    entropy -= log_probability.masked_fill(is_ignored, 0.0).sum()
    if correct is not None:
        correct += softmax.is_argmax(softmax.extra[:, 1] == 1).sum()
    if squares is not None:
        log_sum_exp = (softmax.greatest + log_total).masked_fill(is_ignored, 0.0)
        squares += log_sum_exp.square().sum()
    if not differentiate:
        return None
    factor = ((maximum - softmax.greatest).exp() / softmax.total).masked_fill(is_ignored, 0.0)
    if squares is not None:
        factor *= 1.0 + 2.0 * z_loss_weight * log_sum_exp
    # In fp32: in bf16 a probability of 0.999 is 1, and p - 1 would be 0 instead of -0.001.
    difference = _probabilities(own, maximum, factor, valid) - (~is_absent).float().unsqueeze(1)
    difference *= logit_map.slope(own.float())
    return factor, difference.squeeze(1).to(own.dtype)


def _to_logit_gradients_(
    logits: Tensor,
    column: Tensor,
    maximum: Tensor,
    gradients: tuple[Tensor, Tensor],
    valid: int,
    logit_map: LogitMap,
    ops: ElementwiseOps,
) -> None:
    """Turn mapped `logits` [n, v/t] into (probability - target) · slope in place, each rounded
    once.

    With 4 columns on this rank, rows whose target is column 2 and on another rank:

        column 2             p0   p1   p2 - 1   p3
        column 0, absent     p0   p1   p2       p3

    Dividing by the number of tokens here would round every target in the same direction: a bias of
    up to 0.4 % in bf16.

    Args:
        gradients: of `_add_rows_`.
    """
    factor, difference = gradients
    ops.map_rows(
        _to_probabilities_,
        (logits, maximum, factor),
        valid,
        logit_map,
        accelerator_elements=SLICE_ELEMENTS,
    )
    # `scatter_` would copy all logits twice on a CPU.
    logits[torch.arange(len(logits), device=logits.device), column] = difference


def _add_product_(
    total: Tensor, first: Tensor, second: Tensor, ops: ElementwiseOps = CHUNKED
) -> None:
    """Add firstᵀ · second to `total`, which is in fp32. [n, v/t], [n, h] → [v/t, h].

    If the GEMM cannot accumulate in fp32, a bf16 product is rounded first. An fp16 product is
    computed in fp32, because a sum over many tokens can overflow fp16 before the loss scale is
    applied.
    """
    if first.dtype == torch.float32:
        total.addmm_(first.t(), second)
        return
    if total.device.type in _FP32_SUMS:
        torch.addmm(total, first.t(), second, out_dtype=torch.float32, out=total)
        return
    is_fp16 = first.dtype == torch.float16
    second = second.float() if is_fp16 else second
    # In slices of rows, because the product needs a tensor of its own here: a whole one would be as
    # large as the weight.
    step = max(1, BLOCK_ELEMENTS // second.shape[1])
    for start in ops.chunk_starts(first.shape[1], step):
        rows = slice(start, start + step)
        if is_fp16:
            total[rows].addmm_(first[:, rows].t().float(), second)
        else:
            # `+=` would also copy the rows onto themselves.
            total[rows].add_(first[:, rows].t() @ second)


def _scaled(tensor: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return tensor · scale, rounded once to `dtype`; in place, if no other backward may follow.

    A scale rounded to bf16 first would bias every gradient by up to 0.4 %.
    """
    if tensor is None:
        return None
    # torch's own compiled functions ask so, too, before they reuse what forward has saved.
    another_backward = torch._C._autograd._get_current_graph_task_keep_graph()
    fits = tensor.dtype == dtype and not another_backward
    out = tensor if fits else torch.empty_like(tensor, dtype=dtype)
    # In chunks, because a CPU makes whole fp32 copies for a product of two dtypes.
    for rows in CHUNKED.chunks(tensor):
        # With a scale of one dimension the product is in fp32, with a scalar in the tensor's dtype.
        torch.mul(tensor[rows], scale.reshape(1), out=out[rows])
    return out


def _divisor(divisor: Tensor | float | None, counted: Tensor, hidden: Tensor) -> Tensor:
    """Return the number that the sum of the losses is divided by, fp32 [0-d] on the device.

    By default it is the number of counted labels.
    """
    divisor = counted.sum() if divisor is None else nonzero_divisor(divisor)
    if not isinstance(divisor, Tensor):
        divisor = hidden.new_full((), divisor, dtype=torch.float32)
    return divisor.to(hidden.device, torch.float32)


def _block(
    is_ignored: Tensor, labels: Tensor, hidden: Tensor, first: int, valid: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a block's rows, their targets' columns on this rank, and which targets are absent.

    With 2 ranks of 3 rows of the vocabulary, rank 1 (first = 3) has for the labels 1, 3, ignored:

        column    0, 0, 0
        absent    1, 0, 1       another rank has the first; the third has none
        rows      x, y, 0       zeros, so that NaNs in an ignored row cannot leak into the sums
    """
    column = labels - first
    is_absent = is_ignored | (column < 0) | (column >= valid)
    rows = hidden.masked_fill(is_ignored.unsqueeze(1), 0.0)
    return rows, column.masked_fill(is_absent, 0), is_absent


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
        accuracy: bool,
        differentiate: bool,
        logit_map: LogitMap,
        z_loss_weight: float,
        ops: ElementwiseOps,
    ) -> tuple[Tensor, ...]:
        """Return (loss, number of labels that are the argmax), and save the gradients.

        With a weight of the z-loss, the other fields of `TokenLoss` follow.

        - `needs_input_grad` says what the tensors require, under `no_grad` too: `differentiate` is
          false there.
        - Every rank has all labels, so the denominator needs no communication.
        - An ignored row adds nothing to any gradient: its factor, and so its probabilities, are 0,
          and it has no target.
        - At the end comes the backward of f or g: each rank's columns of the vocabulary have given
          a part of the hidden gradient.
        """
        if sequence:
            hidden = all_gather(hidden, group)
        length, batch, _ = hidden.shape
        first, valid = vocab_shard_range(vocabulary, group_rank(group), group_size(group))
        needs = [differentiate and needed for needed in ctx.needs_input_grad[:3]]
        needs_hidden, needs_weight, needs_bias = needs
        is_ignored = labels == ignore
        denominator = _divisor(divisor, ~is_ignored, hidden)
        sums = _Sums(hidden.device, z_loss_weight)
        hidden_gradient = weight_gradient = bias_gradient = None
        if needs_hidden:
            # Contiguous, because each block is written through a flattened view.
            hidden_gradient = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        rows, columns = weight.shape
        if needs_bias:
            bias_gradient = torch.zeros(rows, dtype=torch.float32, device=hidden.device)
        step = block_positions(length, batch, rows, columns if needs_weight else 0, weight.dtype)
        if needs_weight and accumulates_in_fp32(length, step, weight.dtype):
            weight_gradient = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        settings = z_loss_weight, valid, logit_map, any(needs)
        for start in ops.chunk_starts(length, step):
            positions = slice(start, start + step)
            ignored = is_ignored[positions].flatten()
            inputs = labels[positions].flatten(), hidden[positions].flatten(0, 1)
            block, column, is_absent = ops.map_rows(_block, (ignored, *inputs), first, valid)
            logits = map_logits_(F.linear(block, weight, bias), logit_map, ops)
            scores = _all_gather_rows(logits, column, is_absent, valid, group, ops, accuracy)
            tensors = ignored, is_absent, *scores
            gradients = ops.map_rows(_add_rows_, tensors, *sums.tensors(accuracy), *settings)
            if gradients is not None:
                _to_logit_gradients_(logits, column, scores[0], gradients, valid, logit_map, ops)
            if hidden_gradient is not None:
                torch.matmul(logits, weight, out=hidden_gradient[positions].flatten(0, 1))
            if bias_gradient is not None:
                bias_gradient += logits.sum(0, dtype=torch.float32)
            if weight_gradient is not None:
                _add_product_(weight_gradient, logits, block, ops)
            elif needs_weight:
                weight_gradient = logits.t() @ block
            del logits  # before the next block's are made
        if hidden_gradient is not None and group_size(group) > 1:
            hidden_gradient = (reduce_scatter if sequence else all_reduce)(hidden_gradient, group)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient, denominator)
        ctx.dtypes = hidden.dtype, weight.dtype
        outputs = sums.outputs(denominator)
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient, bias_gradient, denominator = ctx.saved_tensors
        # The mean over no token is 0/0 = nan and its gradient zero, as in torch.
        scale = gradient.float() / denominator.masked_fill(denominator == 0, 1.0)
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            _scaled(hidden_gradient, scale, hidden_dtype),
            _scaled(weight_gradient, scale, weight_dtype),
            _scaled(bias_gradient, scale, weight_dtype),
            *(None,) * 11,
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
    accuracy: bool = False,
    logit_map: LogitMap = LogitMap(),  # noqa: B008 (immutable)
    z_loss_weight: float = 0.0,
    ops: ElementwiseOps = CHUNKED,
) -> TokenLoss:
    """Return the mean cross entropy of `hidden` Wᵀ + `bias` against `labels`, and how many labels
    are the argmax.

    Forward over TP: all-gather of the hidden states under SP; one all-gather of 3 numbers a token;
    all-reduce (reduce-scatter under SP) of the hidden gradient if one is needed. Backward: none.

    Args:
        hidden: [s, b, h], or a sequence shard [s/t, b, h] when `sequence`.
        weight: this rank's [⌈v/t⌉, h] rows of the output layer.
        labels: whole [s, b], each the token that its position predicts, or `ignore_index`. Their
            range is not checked.
        bias: this rank's [⌈v/t⌉] of the output layer's bias, if it has one.
        vocabulary: v; rows past it get no probability and no gradient.
        divisor: divides the sum of the losses; by default the number of labels that are not
            ignored. A 0-d tensor needs no synchronisation.
        accuracy: count the labels that are the argmax, or else return 0. It takes another pass over
            the logits, and one number more a token in the all-gather.
        logit_map: function of each logit.
        z_loss_weight: of the mean of log²(Σ exp(logit)) with the same divisor, which the loss
            adds (arXiv 2204.02311, section 5).
        ops: runs the softmax, and chooses the blocks.

    Returns:
        The loss is nan if every label is ignored, as in torch, but 0 with a `divisor`.
    """
    # Grad mode is passed on, because torch disables it inside an autograd function's forward.
    options = (
        vocabulary,
        ignore_index,
        group,
        sequence,
        divisor,
        accuracy,
        torch.is_grad_enabled(),
        logit_map,
        z_loss_weight,
        ops,
    )
    loss, correct, *parts = _LinearCrossEntropy.apply(hidden, weight, bias, labels, *options)
    return TokenLoss(loss, correct, *(parts or (loss, None)))
