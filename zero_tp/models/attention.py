"""Causal self-attention split by heads (arXiv 1909.08053, section 3).

s sequence, b batch, h hidden, a heads, d head size, t TP size.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.models.regions import LayerRegions
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.linear import ColumnParallelLinear, RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, Dropout, RandomStreams


def visible(padding: Tensor, length: int) -> Tensor:
    """Who attends to whom, boolean [b, 1, s, s]: causal, with padding [b, s] (1 = a token, 0 = padding).

    A position that sees no token at all (padding on the left) attends to itself, so that its softmax is defined; nobody
    reads its output.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=padding.device).tril()
    seen = causal & padding.bool()[:, None, None, :]
    itself = torch.eye(length, dtype=torch.bool, device=padding.device)
    return seen | (itself & ~seen.any(-1, keepdim=True))


class AttentionCore(nn.Module):
    """softmax(QKᵀ/√d)V with dropout on the softmax. Q, K, V [b, a/t, s, d] → [b, a/t, s, d].

    Dropout draws from the per-rank stream: heads differ over TP.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.p, self.streams = spec.dropouts.attention, streams

    @staticmethod
    def mask(padding: Tensor | None, length: int, like: Tensor) -> Tensor | None:
        """What is added to the scores, [b, 1, s, s] or [1, 1, s, s]: 0, or -∞ where nothing is seen. Made once for all
        layers; None where the core needs no mask.

        Args:
            padding: [b, s], 1 for a token and 0 for padding; None when nothing is padded.
            length: s.
            like: of the dtype and on the device of the activations.
        """
        seen = visible(torch.ones(1, length, device=like.device) if padding is None else padding, length)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


class SDPACore(AttentionCore):
    """Through `scaled_dot_product_attention`, which needs no mask where nothing is padded.

    It would take a boolean mask too, but turn it into one like ours in every layer, and keep that for backward.
    """

    @staticmethod
    def mask(padding: Tensor | None, length: int, like: Tensor) -> Tensor | None:
        return None if padding is None else AttentionCore.mask(padding, length, like)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None
        if self.p == 0.0 or not self.training:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        with self.streams.use(PER_RANK):
            return F.scaled_dot_product_attention(query, key, value, mask, self.p, causal)


class EagerCore(AttentionCore):
    """The same in separate operations: scores, softmax, dropout, attention over V.

    Backward keeps what the papers count and no more: Q, K, V, the softmax's output, a dropout mask of one byte an
    element and the dropout's output. Scale and mask are part of the product that makes the scores, so they keep
    nothing; the softmax computes in fp32 inside and rounds once, its output keeps the dtype of Q.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__(spec, streams)
        self.scale = spec.head_size**-0.5
        self.dropout = Dropout(self.p, streams, PER_RANK)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        batch, heads, length, _ = query.shape
        added = mask.expand(batch, heads, length, length).flatten(0, 1)  # no copy unless rows are padded differently
        scores = torch.baddbmm(added, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=self.scale)
        return self.dropout(scores.unflatten(0, (batch, heads)).softmax(-1)) @ value


CORES: dict[str, type[AttentionCore]] = {"sdpa": SDPACore, "eager": EagerCore}


class Attention(nn.Module):
    """Fused QKV by columns, attention over this rank's heads, output projection by rows.

    [s, b, h] → [s, b, h], sequence shards under SP. The QKV weight holds Q | K | V blocks, each split by heads.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, regions: LayerRegions):
        super().__init__()
        self.head_size, self.regions = spec.head_size, regions
        width = spec.heads * spec.head_size
        self.qkv = ColumnParallelLinear(
            make.child("qkv"), spec.hidden, (width, width, width), bias=spec.bias, init=Normal(spec.init_std)
        )
        self.core = CORES[spec.attention](spec, streams)
        self.output = RowParallelLinear(
            make.child("output"), width, spec.hidden, bias=spec.bias, init=Normal(spec.residual_std)
        )

    def forward(self, tensor: Tensor, mask: Tensor | None, *, sequence: bool) -> Tensor:
        fused = self.qkv(tensor, sequence=sequence)  # [s, b, 3·h/t]
        length, batch, _ = fused.shape
        query, key, value = fused.view(length, batch, 3, -1, self.head_size).permute(2, 1, 3, 0, 4)  # [b, a/t, s, d]
        mixed = self.regions.attention_core(partial(self.core, mask=mask), query, key, value)
        return self.output(mixed.permute(2, 0, 1, 3).reshape(length, batch, -1), sequence=sequence)
