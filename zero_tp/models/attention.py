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


def attention_mask(padding: Tensor | None, length: int) -> Tensor | None:
    """The boolean mask [b, 1, s, s] of causal attention with padding [b, s] (1 = a token, 0 = padding).

    None when nothing is padded: causal attention needs no mask tensor. A position that sees no token at all (padding on
    the left) attends to itself, so that its softmax is defined; nobody reads its output.
    """
    if padding is None:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=padding.device).tril()
    visible = causal & padding.bool()[:, None, None, :]
    itself = torch.eye(length, dtype=torch.bool, device=padding.device)
    return visible | (itself & ~visible.any(-1, keepdim=True))


class SDPACore(nn.Module):
    """softmax(QKᵀ/√d)V through `scaled_dot_product_attention`, dropout included.

    Q, K, V [b, a/t, s, d] → [b, a/t, s, d]. Dropout draws from the per-rank stream: heads differ over TP.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.p, self.streams = spec.dropouts.attention, streams

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None
        if self.p == 0.0 or not self.training:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
        with self.streams.use(PER_RANK):
            return F.scaled_dot_product_attention(query, key, value, mask, self.p, causal)


class EagerCore(nn.Module):
    """The same in separate operations: scores, fp32 softmax, dropout, attention over V."""

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.scale = spec.head_size**-0.5
        self.dropout = Dropout(spec.dropouts.attention, streams, PER_RANK)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length = query.shape[2]
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        scores = (query @ key.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return self.dropout(weights) @ value


CORES = {"sdpa": SDPACore, "eager": EagerCore}


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
