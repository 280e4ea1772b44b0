"""Causal self-attention is split by heads (arXiv 1909.08053, section 3).

s sequence, b batch, h hidden, a heads, d head size, t TP size.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zero_tp.models.context import AttentionMask, ForwardContext
from zero_tp.models.norm import NORMS
from zero_tp.models.position import rotate
from zero_tp.models.projection import projection
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.elementwise import ElementwiseModule
from zero_tp.parallel.linear import RowParallelLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, Dropout, RandomStreams


def for_each_head(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for the queries that they serve in turn. [b, k, s, d] → [b, heads, s, d]."""
    times = heads // key.shape[1]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)


class AttentionCore(nn.Module):
    """The core computes softmax(QKᵀ/√d)V with dropout on the softmax.

    Q [b, a/t, s, d], K and V of as many heads or of a divisor of them, each serving as many queries in turn →
    [b, a/t, s, d].

    Dropout draws from the per-rank stream: heads differ over TP.
    """

    def __init__(self, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        self.p, self.streams = spec.dropouts.attention, streams

    @staticmethod
    def mask(mask: AttentionMask, like: Tensor) -> Tensor | None:
        """Return what is added to the scores, [b or 1, 1, s, keys]: 0, or -∞ where nothing is seen; None where the core
        needs no mask. Layers that see alike share it.

        Args:
            like: of the dtype and on the device of the activations.
        """
        seen = mask.seen(like.device)
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


class SDPACore(AttentionCore):
    """This core calls `scaled_dot_product_attention`, which needs no mask where nothing is padded.

    It would take a boolean mask too, but turn it into one like ours in every layer, and keep that for backward.
    """

    @staticmethod
    def mask(mask: AttentionMask, like: Tensor) -> Tensor | None:
        return None if mask.is_causal_alone else AttentionCore.mask(mask, like)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        causal = mask is None and query.shape[2] > 1  # a single query sees every key
        dropped = self.p if self.training else 0.0
        if mask is not None and query.device.type != "cpu":
            key, value = for_each_head(key, value, query.shape[1])  # beside a mask CUDA's fused kernels take no groups
        grouped = key.shape[1] != query.shape[1]
        with self.streams.use(PER_RANK) if dropped else nullcontext():
            return F.scaled_dot_product_attention(query, key, value, mask, dropped, causal, enable_gqa=grouped)


class EagerCore(AttentionCore):
    """This core computes in separate operations: scores, softmax, dropout, attention over V.

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
        key, value = for_each_head(key, value, heads)
        # No copy unless rows are padded differently.
        added = mask.expand(batch, heads, length, key.shape[2]).flatten(0, 1)
        scores = torch.baddbmm(added, query.flatten(0, 1), key.flatten(0, 1).transpose(1, 2), alpha=self.scale)
        return self.dropout(scores.unflatten(0, (batch, heads)).softmax(-1)) @ value


CORES: dict[str, type[AttentionCore]] = {"sdpa": SDPACore, "eager": EagerCore}


class Attention(ElementwiseModule):
    """Attention is split: QKV by columns, the core by heads, the output projection by rows.

    [s, b, h] → [s, b, h], sequence shards under SP.

    Args:
        number: the layer's.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, number: int):
        super().__init__()
        self.number, self.window = number, spec.windows[number]
        self.qkv = projection(make.child("qkv"), spec)
        self.core = CORES[spec.attention](spec, streams)
        self.output = RowParallelLinear(
            make.child("output"),
            spec.heads * spec.head_size,
            spec.hidden,
            bias=spec.output_bias,
            init=Normal(spec.residual_std),
        )
        self.query_norm: nn.Module = nn.Identity()
        self.key_norm: nn.Module = nn.Identity()
        if spec.query_key_norm:
            norm, own_heads = NORMS[spec.norm], make.topology.tensor > 1
            self.query_norm = norm(make.child("query_norm"), spec.head_size, spec.norm_epsilon, part=own_heads)
            self.key_norm = norm(make.child("key_norm"), spec.head_size, spec.norm_epsilon, part=own_heads)

    def forward(self, tensor: Tensor, *, context: ForwardContext) -> Tensor:
        query, key, value = self.qkv(tensor, sequence=context.sequence)
        query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = (rotate(each, context.rotation, self.elementwise) for each in (query, key))
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.number)
        key, value = self.qkv.for_each_query(key), self.qkv.for_each_query(value)
        mixed = self.core(query, key, value, mask=context.masks[self.window])  # [b, a/t, s, d]
        return self.output(mixed.permute(2, 0, 1, 3).flatten(2), sequence=context.sequence)
