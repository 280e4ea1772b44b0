"""Shape: the sizes and choices of a model that planning counts with. The one place that reads a TransformerSpec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_tp.models.spec import TransformerSpec


@dataclass(frozen=True)
class Shape:
    """A model, free of torch.

    Attributes:
        hidden, layers, heads, kv_heads, head_size, mlp_size, vocabulary, positions: sizes (h, L, a, k, d, f, v, longest
            sequence).
        gated: the MLP has a gate beside its first weight.
        rms_norm: norms keep one number a row instead of two.
        learned_positions: positions are a weight; else rotary.
        windows: of each layer: how many tokens a token sees, or None.
        rotary_size: features of a head that turn.
        query_key_norm: a norm over each head's features of queries and keys.
        parallel_layer: attention and MLP both start from the layer's input.
        tied: the output layer is the word embedding.
        embedding_dropout, residual_dropout, attention_dropout: whether there is any.
        eager: attention in separate operations; else one fused kernel where there is one.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    positions: int
    gated: bool
    rms_norm: bool
    learned_positions: bool
    windows: tuple[int | None, ...]
    rotary_size: int
    query_key_norm: bool
    parallel_layer: bool
    tied: bool
    embedding_dropout: bool
    residual_dropout: bool
    attention_dropout: bool
    eager: bool

    @classmethod
    def of(cls, spec: TransformerSpec) -> Shape:
        return cls(
            hidden=spec.hidden,
            layers=spec.layers,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_size=spec.head_size,
            mlp_size=spec.mlp_size,
            vocabulary=spec.vocabulary,
            positions=spec.positions,
            gated=spec.mlp == "gated",
            rms_norm=spec.norm == "rms_norm",
            learned_positions=spec.position == "learned",
            windows=spec.windows,
            rotary_size=spec.rotary.size if spec.rotary is not None else 0,
            query_key_norm=spec.query_key_norm,
            parallel_layer=spec.layer == "parallel",
            tied=spec.tied,
            embedding_dropout=spec.dropouts.embedding > 0,
            residual_dropout=spec.dropouts.residual > 0,
            attention_dropout=spec.dropouts.attention > 0,
            eager=spec.attention == "eager",
        )

    def kv_heads_of_rank(self, tensor: int) -> int:
        """KV heads that TP rank 0 computes; where k does not divide by t, those that its a/t queries need."""
        if self.kv_heads % tensor == 0:
            return self.kv_heads // tensor
        queries = self.heads // tensor
        return -(-queries * self.kv_heads // self.heads)

    def vocabulary_of_rank(self, tensor: int) -> int:
        """Rows of the word embedding on one rank: ⌈v/t⌉."""
        return -(-self.vocabulary // tensor)

    def layer_products(self) -> int:
        """Multiply-adds of one layer's weights a token: the elements of its matrices."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.hidden * self.mlp_size

    def forward_flops(self, batch: int, length: int) -> tuple[float, float, float]:
        """(one layer's weights, one layer's attention core, the output layer) in a forward of `batch` sequences.

        Two FLOPs a multiply-add; the core counts every score, as the papers do, also those that a causal mask hides.
        With GPT-2's layers, three times their sum over L layers is equation 7 of arXiv 2205.05198.
        """
        tokens = batch * length
        core = 4.0 * tokens * length * self.heads * self.head_size
        return 2.0 * tokens * self.layer_products(), core, 2.0 * tokens * self.hidden * self.vocabulary

    def model_flops(self, global_batch: int, length: int) -> float:
        """FLOPs that one step needs by its mathematics, forward and backward, whatever is recomputed."""
        layer, core, logits = self.forward_flops(global_batch, length)
        return 3 * (self.layers * (layer + core) + logits)
