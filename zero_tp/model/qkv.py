"""Projections to the queries, keys and values of this rank's heads.

s sequence, b batch, h hidden, a heads, k KV heads, d head size, t TP size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.position import Rotation, apply_rotary, apply_rotary_to_product, split_heads
from zero_tp.parallel.elementwise import ElementwiseOps
from zero_tp.parallel.layout import Layout, Replicated, Sharded
from zero_tp.parallel.linear import ColumnParallelLinear, column_parallel_linear
from zero_tp.parallel.parameter import ConstantInit, Normal, ParameterMaker

Heads = tuple[Tensor, Tensor, Tensor]
"""Queries [b, a/t, s, d]; keys and values [b, the KV heads that these need, s, d]."""


def heads_by_rank(heads: int, kv_heads: int, tensor: int) -> list[range]:
    """Return the KV heads that each TP rank's queries need.

    Ranks share some if `tensor` does not divide `kv_heads`. 6 queries and 3 KV heads on TP 2:

        q0 q1   q2 q3   q4 q5       rank 0 has q0 q1 q2 and needs k0 k1: range(0, 2)
         k0      k1      k2         rank 1 has q3 q4 q5 and needs k1 k2: range(1, 3)
    """
    local = heads // tensor
    group_size = heads // kv_heads
    return [
        range(r * local // group_size, ((r + 1) * local - 1) // group_size + 1)
        for r in range(tensor)
    ]


class FusedQKV(ColumnParallelLinear):
    """One weight of Q | K | V blocks, each split by heads, for models with as many KV heads as
    query heads.

    Four heads on TP 2; a plain cut in two would give rank 0 all queries and no value:

        whole     q0 q1 q2 q3 k0 k1 k2 k3 v0 v1 v2 v3
        rank 0    q0 q1 k0 k1 v0 v1
        rank 1    q2 q3 k2 k3 v2 v3
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        width = spec.heads * spec.head_size
        super().__init__(
            make, spec.hidden, (width, width, width), bias=spec.qkv_bias, init=Normal(spec.init_std)
        )
        self.head_size = spec.head_size

    def forward(  # type: ignore[override]
        self, tensor: Tensor, *, sequence: bool, rotation: Rotation | None, ops: ElementwiseOps
    ) -> Heads:
        """Project [s, b, h], a sequence shard when `sequence`, to heads of the whole sequence.

        Args:
            rotation: of queries and keys; None: not here.
        """
        product = super().forward(tensor, sequence=sequence)
        if rotation is not None:
            return apply_rotary_to_product(product, self.head_size, rotation, ops)
        # Each chunk is this rank's Q, K or V, because the layout splits each of them by itself.
        # Not one view and `unbind`, whose backward copies the gradients twice.
        parts = product.chunk(3, -1)
        # On one CPU thread that takes 9 ms, where stacking and copying took 40 (bf16, 4,096 tokens,
        # h 1,024; benchmarks/tried.md).
        query, key, value = (split_heads(part, self.head_size) for part in parts)
        return query, key, value

    def repeat_for_queries(self, key_or_value: Tensor) -> Tensor:
        """Return keys or values unchanged: each query head has its own."""
        return key_or_value


class GroupedQKV(nn.Module):
    """Fewer KV heads than heads (arXiv 2305.13245): separate query, key and value weights.

    If t does not divide k, keys and values are replicated. A rank then computes the heads that its
    queries need, and a hook sums the partial gradients over TP. The parameters' names are the same
    on every topology. With `output_gate` queries are [b, a/t, s, 2d], each followed by its gate.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec):
        super().__init__()
        topology = make.topology
        self.head_size = spec.head_size
        self.topology = topology
        # A head's query, then its gate, as transformers' classes have them.
        self.query_size = spec.head_size * (2 if spec.output_gate else 1)
        width = spec.heads * self.query_size
        kv_width = spec.kv_heads * spec.head_size
        split = spec.kv_heads % topology.tensor == 0
        # Partial without SP too: a rank's gradient has only the heads that its queries use, and of
        # a head that ranks share only the part of its own queries.
        replicated: Layout = Replicated("partial")
        kv_layout = Sharded(0, (kv_width,)) if split else replicated

        def bias(name: str, size: int, layout: Layout) -> nn.Parameter | None:
            return (
                make.parameter(name, (size,), layout, ConstantInit(0.0)) if spec.qkv_bias else None
            )

        # Three weights and not one: replicated keys and values cannot be rows of a weight that is
        # split.
        init = Normal(spec.init_std)
        self.query = make.parameter("query", (width, spec.hidden), Sharded(0, (width,)), init)
        self.key = make.parameter("key", (kv_width, spec.hidden), kv_layout, init)
        self.value = make.parameter("value", (kv_width, spec.hidden), kv_layout, init)
        self.query_bias = bias("query_bias", width, Sharded(0, (width,)))
        self.key_bias = bias("key_bias", kv_width, kv_layout)
        self.value_bias = bias("value_bias", kv_width, kv_layout)

        # A rank multiplies the rows of the heads that it needs; the gradient of the other rows is
        # zero.
        own = heads_by_rank(spec.heads, spec.kv_heads, topology.tensor)[topology.tensor_rank]
        self.rows = None if split else slice(own.start * spec.head_size, own.stop * spec.head_size)
        local = spec.heads // topology.tensor
        group_size = spec.heads // spec.kv_heads
        queries = range(topology.tensor_rank * local, (topology.tensor_rank + 1) * local)
        counts = [sum(query // group_size == head for query in queries) for head in own]
        # With k = 3 and t = 2 a rank may have 4 queries of one KV head and 2 of another.
        self.queries_per_head = None if len(set(counts)) == 1 else counts

    def forward(
        self, tensor: Tensor, *, sequence: bool, rotation: Rotation | None, ops: ElementwiseOps
    ) -> Heads:
        """Project and rotate as `FusedQKV` does."""
        weights = (self.query, self.key, self.value)
        biases = (self.query_bias, self.key_bias, self.value_bias)
        rows = (None, self.rows, self.rows)
        projected = column_parallel_linear(
            tensor, weights, biases, self.topology, sequence=sequence, rows=rows
        )
        sizes = (self.query_size, self.head_size, self.head_size)
        query, key, value = (
            split_heads(part, size) for part, size in zip(projected, sizes, strict=True)
        )
        if rotation is not None:
            query, key = apply_rotary(query, key, rotation, ops)
        return query, key, value

    def repeat_for_queries(self, key_or_value: Tensor) -> Tensor:
        """Repeat KV heads [b, KV heads, s, d] if they serve different numbers of queries; the
        cores repeat evenly.
        """
        # SDPA's `enable_gqa` and `repeat_kv_heads` give each KV head equally many queries.
        if self.queries_per_head is None:
            return key_or_value
        # With 6 queries in groups of 2 on TP 2, rank 0 has q0 q1 q2: its counts are [2, 1], and its
        # keys k0 k1 become k0 k0 k1.
        # An index tensor would be copied to the device, which synchronises.
        heads = zip(key_or_value.split(1, 1), self.queries_per_head, strict=True)
        return torch.cat([head.expand(-1, queries, -1, -1) for head, queries in heads], 1)
