"""The one Transformer: embedding, pre-norm layers, final norm.

s sequence, b batch, h hidden, v vocabulary, t TP size. The residual stream is [s, b, h], under SP [s/t, b, h].
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from zero_tp.models.attention import CORES, Attention
from zero_tp.models.mlp import MLPS
from zero_tp.models.norm import NORMS
from zero_tp.models.position import POSITIONS
from zero_tp.models.regions import LayerRegions
from zero_tp.models.spec import TransformerSpec
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, SHARED, Dropout, RandomStreams


class Embedding(nn.Module):
    """Words plus positions, then dropout. Token ids [s, b] → [s, b, h], [s/t, b, h] under SP."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, dropout: Dropout):
        super().__init__()
        init = Normal(spec.init_std)
        self.tensor_rank = make.topology.tensor_rank
        self.word = VocabParallelEmbedding(make.child("word"), spec.vocabulary, spec.hidden, init=init)
        self.position = POSITIONS[spec.position](make.child("position"), spec.positions, spec.hidden, init=init)
        self.dropout = dropout

    def forward(self, tokens: Tensor, *, sequence: bool) -> Tensor:
        words = self.word(tokens, sequence=sequence)
        length = words.shape[0]
        first = self.tensor_rank * length if sequence else 0
        return self.dropout(words + self.position(first, length))


class TransformerLayer(nn.Module):
    """Pre-norm layer: x + attention(norm(x)), then x + mlp(norm(x)). [s, b, h] → [s, b, h], shards under SP.

    Attributes:
        regions: what backward may compute again; a recompute policy changes them.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, dropout: Dropout):
        super().__init__()
        self.regions = LayerRegions()
        norm = NORMS[spec.norm]
        self.attention_norm = norm(make.child("attention_norm"), spec.hidden, spec.norm_epsilon)
        self.attention = Attention(make.child("attention"), spec, streams, self.regions)
        self.mlp_norm = norm(make.child("mlp_norm"), spec.hidden, spec.norm_epsilon)
        self.mlp = MLPS[spec.mlp](make.child("mlp"), spec, self.regions)
        self.dropout = dropout

    def forward(self, stream: Tensor, mask: Tensor | None, *, sequence: bool) -> Tensor:
        return self.regions.layer(partial(self._forward, mask=mask, sequence=sequence), stream)

    def _forward(self, stream: Tensor, mask: Tensor | None, sequence: bool) -> Tensor:
        norm, attention = self.attention_norm, partial(self.attention, mask=mask, sequence=sequence)
        stream = stream + self.dropout(self.regions.norm(partial(norm, sequence=sequence), stream, attention))
        norm, mlp = self.mlp_norm, partial(self.mlp, sequence=sequence)
        return stream + self.dropout(self.regions.norm(partial(norm, sequence=sequence), stream, mlp))


class Transformer(nn.Module):
    """Token ids [s, b] → hidden states [s, b, h], a sequence shard [s/t, b, h] when `sequence`."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        # Under SP a rank drops its own positions; without it TP ranks repeat the residual stream and must agree.
        stream = PER_RANK if make.topology.sequence else SHARED
        self.mask = CORES[spec.attention].mask
        self.embedding = Embedding(make.child("embedding"), spec, Dropout(spec.dropouts.embedding, streams, stream))
        self.layers = nn.ModuleList(
            TransformerLayer(
                make.child(f"layers.{index}"), spec, streams, Dropout(spec.dropouts.residual, streams, stream)
            )
            for index in range(spec.layers)
        )
        self.final_norm = NORMS[spec.norm](make.child("final_norm"), spec.hidden, spec.norm_epsilon)

    def forward(self, tokens: Tensor, padding: Tensor | None = None, *, sequence: bool) -> Tensor:
        """`padding` [b, s]: 1 for a token, 0 for padding; None when nothing is padded."""
        stream = self.embedding(tokens, sequence=sequence)
        mask = self.mask(padding, tokens.shape[0], stream)
        for layer in self.layers:
            stream = layer(stream, mask, sequence=sequence)
        return self.final_norm(stream, sequence=sequence)
