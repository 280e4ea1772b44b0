"""The one Transformer: embedding, pre-norm layers, final norm.

s sequence, b batch, h hidden, v vocabulary, t TP size. The residual stream is [s, b, h], under SP [s/t, b, h].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from zero_tp.models.attention import CORES, Attention, Shared
from zero_tp.models.mlp import MLPS
from zero_tp.models.norm import NORMS
from zero_tp.models.position import POSITIONS, rotation
from zero_tp.models.regions import LayerRegions
from zero_tp.models.spec import TransformerSpec
from zero_tp.models.visibility import Visibility
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, SHARED, Dropout, RandomStreams


class Embedding(nn.Module):
    """Words plus learned positions, if there are any, then dropout. Token ids [s, b] → [s, b, h], [s/t, b, h] under
    SP."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, dropout: Dropout):
        super().__init__()
        init = Normal(spec.init_std)
        self.tensor_rank = make.topology.tensor_rank
        self.word = VocabParallelEmbedding(
            make.child("word"), spec.vocabulary, spec.hidden, init=init, padding_token=spec.padding_token
        )
        position = POSITIONS[spec.position]
        self.position = None
        if position is not None:
            self.position = position(make.child("position"), spec.positions, spec.hidden, init=init)
        self.dropout = dropout

    def forward(self, tokens: Tensor, positions: Tensor, *, sequence: bool) -> Tensor:
        """`positions` [s, b or 1], whole also under SP."""
        stream = self.word(tokens, sequence=sequence)
        if self.position is not None:
            length = stream.shape[0]
            first = self.tensor_rank * length if sequence else 0
            stream = stream + self.position(positions[first : first + length])
        return self.dropout(stream)


Branch = Callable[[Tensor], Tensor]
"""norm, attention or MLP, dropout: what is added to the residual stream."""


def sequential(stream: Tensor, attention: Branch, mlp: Branch) -> Tensor:
    """x + attention(x), then x + mlp(x): the pre-norm layer."""
    stream = stream + attention(stream)
    return stream + mlp(stream)


def parallel(stream: Tensor, attention: Branch, mlp: Branch) -> Tensor:
    """x + attention(x) + mlp(x): both start from the layer's input (GPT-NeoX-20B, arXiv 2204.06745, section 2.1)."""
    return mlp(stream) + attention(stream) + stream


LAYERS: dict[str, Callable[[Tensor, Branch, Branch], Tensor]] = {"sequential": sequential, "parallel": parallel}
"""How a layer's two branches meet the residual stream."""


class TransformerLayer(nn.Module):
    """Two branches with a norm at the input of each. [s, b, h] → [s, b, h], shards under SP.

    Attributes:
        regions: what backward may compute again; a recompute policy changes them.
    """

    def __init__(
        self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams, dropout: Dropout, number: int
    ):
        super().__init__()
        self.regions = LayerRegions()
        self.join = LAYERS[spec.layer]
        norm = NORMS[spec.norm]
        self.attention_norm = norm(make.child("attention_norm"), spec.hidden, spec.norm_epsilon)
        self.attention = Attention(make.child("attention"), spec, streams, self.regions, number)
        self.mlp_norm = norm(make.child("mlp_norm"), spec.hidden, spec.norm_epsilon)
        self.mlp = MLPS[spec.mlp](make.child("mlp"), spec, self.regions)
        self.dropout = dropout

    def forward(self, stream: Tensor, shared: Shared, *, sequence: bool) -> Tensor:
        attention = partial(
            self._branch, self.attention_norm, partial(self.attention, shared=shared, sequence=sequence), sequence
        )
        mlp = partial(self._branch, self.mlp_norm, partial(self.mlp, sequence=sequence), sequence)
        return self.regions.layer(lambda stream: self.join(stream, attention, mlp), stream)

    def _branch(self, norm: nn.Module, transform: Branch, sequence: bool, stream: Tensor) -> Tensor:
        return self.dropout(self.regions.norm(partial(norm, part=sequence), stream, transform))


class Transformer(nn.Module):
    """Token ids [s, b] → hidden states [s, b, h], a sequence shard [s/t, b, h] when `sequence`."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        # Under SP a rank drops its own positions; without it TP ranks repeat the residual stream and must agree.
        stream = PER_RANK if make.topology.sequence else SHARED
        self.spec = spec
        self.embedding = Embedding(make.child("embedding"), spec, Dropout(spec.dropouts.embedding, streams, stream))
        self.layers = nn.ModuleList(
            TransformerLayer(
                make.child(f"layers.{number}"), spec, streams, Dropout(spec.dropouts.residual, streams, stream), number
            )
            for number in range(spec.layers)
        )
        self.final_norm = NORMS[spec.norm](make.child("final_norm"), spec.hidden, spec.norm_epsilon)

    def shared(
        self,
        length: int,
        like: Tensor,
        *,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Shared:
        """What all layers need for a forward of `length` tokens.

        Args:
            like: of the dtype and on the device of the activations.
            positions: [b or 1, s]; by default those after the cached ones.
        """
        past = int(cache.get_seq_length()) if cache is not None else 0
        mask = CORES[self.spec.attention].mask
        masks: dict[int | None, Tensor | None] = {}
        for number, window in enumerate(self.spec.windows):
            if window not in masks:
                keys, first = cache.get_mask_sizes(length, number) if cache is not None else (length, 0)
                masks[window] = mask(Visibility(length, keys, past, first, padding, documents, window), like)
        rotary, turning = self.spec.rotary, None
        if rotary is not None:
            if positions is None:
                positions = torch.arange(past, past + length, device=like.device)[None]
            until = int(positions.max()) + 1 if rotary.by_length else past + length
            turning = rotation(rotary, positions, until, like.dtype)
        return Shared(masks, turning, cache)

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Cache | None = None,
        sequence: bool,
    ) -> Tensor:
        """
        Args:
            padding: [b, all tokens so far], 1 for a token, 0 for padding; None when nothing is padded.
            positions: [b or 1, s]; by default those after the cached ones.
            documents: [b, s], the number of each token's document, which it sees alone.
            cache: keys and values of the tokens before; gets the present ones.
        """
        length = tokens.shape[0]
        past = int(cache.get_seq_length()) if cache is not None else 0
        if positions is None:
            positions = torch.arange(past, past + length, device=tokens.device)[None]
        stream = self.embedding(tokens, positions.t(), sequence=sequence)
        shared = self.shared(length, stream, positions=positions, padding=padding, documents=documents, cache=cache)
        for layer in self.layers:
            stream = layer(stream, shared, sequence=sequence)
        return self.final_norm(stream, part=sequence)
