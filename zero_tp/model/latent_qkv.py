"""Queries, keys and values of narrow latents (multi-head latent attention, DeepSeek-V2, arXiv
2405.04434, section 2.1).

s sequence, b batch, h hidden, a heads, t TP size; d features of a head's queries and keys, of
which r rotate; v features of its values; q and c widths of the latents.

    hidden [h] ── down ── norm ── latent [q] ── up ── queries [a/t, d]
               └─ down ┬─ norm ── latent [c] ── up ┬─ keys [a/t, d - r]
                       │                           └─ values [a/t, v]
                       └─ shared features of all heads' keys [r]

The latents and what makes them are the same on all TP ranks; heads are split. Under SP a rank makes
those of its own tokens, so that the gather sends q + c + r numbers a token, not h.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.norm import NORMS
from zero_tp.model.position import Rotation, apply_rotary, split_heads
from zero_tp.model.qkv import Heads
from zero_tp.parallel.collectives import copy_to_tensor_region, gather_from_sequence_region
from zero_tp.parallel.elementwise import ElementwiseOps
from zero_tp.parallel.linear import ColumnParallelLinear, ReplicatedLinear
from zero_tp.parallel.parameter import Normal, ParameterMaker


class Latent(nn.Module):
    """A linear layer's output, of which the first features are normed. [*, h] → [*, size + rest].

    Args:
        size: width of the latent. rest: features after it that are not normed.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, size: int, rest: int = 0):
        super().__init__()
        assert spec.latent is not None
        sharded = make.topology.sequence
        self.size = size
        self.down = ReplicatedLinear(
            make.child("down"),
            spec.hidden,
            size + rest,
            bias=spec.qkv_bias,
            init=Normal(spec.init_std),
            sharded_input=sharded,
        )
        self.norm = NORMS[spec.norm](
            make.child("norm"), size, spec.latent.norm_epsilon, sharded_input=sharded
        )

    def forward(self, tensor: Tensor) -> list[Tensor]:
        """Return the latent and what follows it."""
        down = self.down(tensor)
        latent, rest = down.split((self.size, down.shape[-1] - self.size), -1)
        return [self.norm(latent), rest]


class LatentQKV(nn.Module):
    """Project to queries, keys and values through latents; each head has its own keys.

    The parameters' names are the same on every topology.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        assert spec.latent is not None
        self.spec = latent = spec.latent
        self.topology = make.topology
        self.head_size = spec.head_size
        self.key_size = spec.head_size - latent.rotated
        init = Normal(spec.init_std)
        self.query_latent: Latent | None = None
        if latent.query is not None:
            self.query_latent = Latent(make.child("query_latent"), spec, latent.query)
        self.query = ColumnParallelLinear(
            make.child("query"),
            latent.query or spec.hidden,
            (spec.heads * spec.head_size,),
            bias=False,
            init=init,
        )
        self.key_value_latent = Latent(
            make.child("key_value_latent"), spec, latent.key_value, latent.rotated
        )
        self.key_value = ColumnParallelLinear(
            make.child("key_value"),
            latent.key_value,
            (spec.heads * (self.key_size + latent.value),),
            bias=False,
            init=init,
        )

    def forward(
        self, tensor: Tensor, *, sequence: bool, rotation: Rotation | None, ops: ElementwiseOps
    ) -> Heads:
        """Project [s, b, h], a sequence shard when `sequence`, to heads of the whole sequence, and
        rotate.

        Queries and keys [b, a/t, s, d], values [b, a/t, s, v].
        """
        parts = self.key_value_latent(tensor)
        if self.query_latent is None:
            product = self.query(tensor, sequence=sequence)
        else:
            parts += self.query_latent(tensor)[:1]
        # One collective for all latents. Their heads' gradients are partial: backward sums them.
        enter = gather_from_sequence_region if sequence else copy_to_tensor_region
        joined = enter(torch.cat(parts, -1), self.topology.tensor_group)
        latent, shared, *queries = joined.split([part.shape[-1] for part in parts], -1)
        if queries:
            product = self.query.multiply(queries[0])
        query = split_heads(product, self.head_size)
        # A copy, because it rotates in place, and products keep the latents beside it.
        shared = split_heads(shared.clone(), self.spec.rotated)
        if rotation is not None:
            query, shared = apply_rotary(query, shared, rotation, ops)
        sizes = (self.key_size, self.spec.value)
        own, value = split_heads(self.key_value.multiply(latent), sum(sizes)).split(sizes, -1)
        key = torch.cat((own, shared.expand(-1, own.shape[1], -1, -1)), -1)
        return query, key, value

    def repeat_for_queries(self, key_or_value: Tensor) -> Tensor:
        """Return keys or values unchanged: each query head has its own."""
        return key_or_value
