"""The Transformer: embedding, layers and, unless the layers are post-norm, a final norm.

s sequence, b batch, h hidden, v vocabulary, t TP size. The residual stream is [s, b, h], under SP
[s/t, b, h].
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.attention import CORES, Attention
from zero_tp.model.context import AttentionMask, ForwardContext, ForwardInputs, VarlenMask
from zero_tp.model.mlp import MLP, GatedMLP
from zero_tp.model.moe import Experts
from zero_tp.model.norm import NORMS
from zero_tp.model.position import LearnedEmbedding, compute_cos_sin
from zero_tp.parallel.embedding import VocabParallelEmbedding
from zero_tp.parallel.parameter import Normal, ParameterMaker
from zero_tp.parallel.random import PER_RANK, SHARED, Dropout, RandomStreams


class Embedding(nn.Module):
    """Sum of the word, token type and position embeddings that the spec has; then an optional norm,
    and dropout.

    Token ids [s, b] → [s, b, h], [s/t, b, h] under SP.
    """

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, dropout: Dropout):
        super().__init__()
        init = Normal(spec.init_std)
        self.tensor_rank = make.topology.tensor_rank
        self.word = VocabParallelEmbedding(
            make.child("word"),
            spec.vocabulary,
            spec.hidden,
            init=init,
            padding_token=spec.padding_token,
        )
        self.position = self.token_type = None
        if spec.position == "learned":
            self.position = LearnedEmbedding(
                make.child("position"), spec.positions, spec.hidden, init=init
            )
        if spec.token_types:
            self.token_type = LearnedEmbedding(
                make.child("token_type"), spec.token_types, spec.hidden, init=init
            )
        self.norm: nn.Module = nn.Identity()
        if spec.embedding_norm:
            sharded = make.topology.sequence
            self.norm = NORMS[spec.norm](
                make.child("norm"), spec.hidden, spec.norm_epsilon, sharded_input=sharded
            )
        self.dropout = dropout

    def forward(
        self, tokens: Tensor, positions: Tensor, types: Tensor | None = None, *, sequence: bool
    ) -> Tensor:
        """Embed `tokens`; `tokens`, `types` and `positions` [s, b or 1] are whole even under SP.

        Args:
            types: rows of the token type embedding, by default 0; without one, token ids whose
                vectors are added.
        """
        stream = self.word(tokens, sequence=sequence)
        length = stream.shape[0]
        # The word embedding's ḡ has left this rank its own tokens: with s 8 and t 2, rank 1 has
        # tokens 4 to 7 and looks up their types and positions only.
        first = self.tensor_rank * length if sequence else 0
        # In GPT-2 types are token ids. ḡ scatters the look-up's sum, so it takes all types.
        if types is not None and self.token_type is None:  # the types are token ids
            stream = stream + self.word(types, sequence=sequence)
        if self.token_type is not None:
            types = torch.zeros_like(tokens) if types is None else types
            stream = stream + self.token_type(types[first : first + length])
        if self.position is not None:
            stream = stream + self.position(positions[first : first + length])
        return self.dropout(self.norm(stream))


MLPS: dict[str, type[MLP] | type[GatedMLP] | type[Experts]] = {
    "mlp": MLP,
    "gated": GatedMLP,
    "experts": Experts,
}


class TransformerLayer(nn.Module):
    """The parts of a layer; subclasses connect them to the residual stream, whose shape they keep.

    Attributes:
        recomputed_norms: norms whose outputs backward can recompute, each with the module that
            reads its output.
        ends_with_norm: the layer's output is normed, so that the model needs no final norm.
    """

    ends_with_norm: ClassVar[bool] = False
    recomputed_norms: ClassVar[tuple[tuple[str, str], ...]] = (
        ("attention_norm", "attention"),
        ("mlp_norm", "mlp"),
    )

    def __init__(
        self,
        make: ParameterMaker,
        spec: TransformerSpec,
        streams: RandomStreams,
        dropout: Dropout,
        number: int,
    ):
        super().__init__()
        norm = NORMS[spec.norm]
        sharded = make.topology.sequence
        self.attention_norm = norm(
            make.child("attention_norm"), spec.hidden, spec.norm_epsilon, sharded_input=sharded
        )
        self.attention = Attention(make.child("attention"), spec, streams, number)
        self.mlp_norm = norm(
            make.child("mlp_norm"), spec.hidden, spec.norm_epsilon, sharded_input=sharded
        )
        self.mlp = MLPS[spec.mlps[number]](make.child("mlp"), spec)
        self.dropout = dropout


class SequentialLayer(TransformerLayer):
    """Pre-norm: attention, then the MLP on its sum."""

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), context=context))
        return x + self.dropout(self.mlp(self.mlp_norm(x), context=context))


class PostNormLayer(TransformerLayer):
    """Post-norm: the residual stream itself is normed, after each sum (arXiv 1706.03762, section
    3.1).
    """

    ends_with_norm = True
    # The output of `mlp_norm` feeds the next layer, so no module of this one can recompute it.
    recomputed_norms = (("attention_norm", "mlp"),)

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, context=context)))
        return self.mlp_norm(x + self.dropout(self.mlp(x, context=context)))


class ParallelLayer(TransformerLayer):
    """Attention and MLP both start from the layer's input (arXiv 2204.06745, section 2.1)."""

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        mlp = self.dropout(self.mlp(self.mlp_norm(x), context=context))
        # Added in the order of transformers' GPT-NeoX, mlp + attention + x, which decides the
        # rounding.
        return mlp + self.dropout(self.attention(self.attention_norm(x), context=context)) + x


LAYERS: dict[str, type[TransformerLayer]] = {
    "sequential": SequentialLayer,
    "parallel": ParallelLayer,
    "post_norm": PostNormLayer,
}


class Transformer(nn.Module):
    """Token ids [s, b] → hidden states [s, b, h], or a shard [s/t, b, h] when `sequence`."""

    def __init__(self, make: ParameterMaker, spec: TransformerSpec, streams: RandomStreams):
        super().__init__()
        # Under SP a rank drops its own positions; without SP all TP ranks must drop the same.
        stream = PER_RANK if make.topology.sequence else SHARED
        self.spec = spec
        self._longest = spec.positions
        self.embedding = Embedding(
            make.child("embedding"), spec, Dropout(spec.dropouts.embedding, streams, stream)
        )
        self.layers = nn.ModuleList(
            LAYERS[spec.layer](
                make.child(f"layers.{number}"),
                spec,
                streams,
                Dropout(spec.dropouts.residual, streams, stream),
                number,
            )
            for number in range(spec.layers)
        )
        self.final_norm: nn.Module = nn.Identity()
        if not LAYERS[spec.layer].ends_with_norm:
            self.final_norm = NORMS[spec.norm](
                make.child("final_norm"),
                spec.hidden,
                spec.norm_epsilon,
                sharded_input=make.topology.sequence,
            )

    def context(
        self, length: int, like: Tensor, inputs: ForwardInputs, *, sequence: bool
    ) -> ForwardContext:
        """Return masks, rotary tables and cache, which all layers share, for `length` tokens.

        Args:
            like: has the dtype and device of the activations.
        """
        past = inputs.past
        cache = inputs.cache
        positions = inputs.positions
        build_mask = CORES[self.spec.attention].build_mask
        masks: dict[int | None, Tensor | VarlenMask | None] = {}
        for number, window in enumerate(self.spec.windows):
            if window not in masks:
                # Asked for each window: a cache keeps fewer keys for windowed layers than for
                # others.
                keys, first = (
                    cache.get_mask_sizes(length, number) if cache is not None else (length, 0)
                )
                limits = (inputs.padding_mask, inputs.packed, window, self.spec.causal)
                masks[window] = build_mask(
                    AttentionMask(length, keys, past, first, *limits), self.spec, like
                )
        rotary = self.spec.rotary
        cos_sin = None
        if rotary is not None:
            total_length = past + length
            if positions is None:
                positions = torch.arange(past, total_length, device=like.device)[None]
            elif rotary.by_length:
                # Frequencies follow the positions that are used, not the number of tokens in this
                # forward.
                total_length = int(positions.max()) + 1
            if rotary.by_length:
                total_length = self._scaled_length(total_length)
            cos_sin = compute_cos_sin(rotary, positions, total_length, like.dtype)
        return ForwardContext(sequence, masks, cos_sin, cache, inputs.balance, inputs.choice_count)

    def _scaled_length(self, length: int) -> int:
        """Return the length that dynamic scaling of rotary frequencies uses in this forward.

        As in transformers, it is that of the longest forward since one was shorter than the
        positions.
        """
        self._longest = (
            self.spec.positions if length < self.spec.positions else max(self._longest, length)
        )
        return self._longest

    def forward(
        self, tokens: Tensor, *, inputs: ForwardInputs, types: Tensor | None = None, sequence: bool
    ) -> Tensor:
        """Return the hidden states after the last norm.

        Args:
            types: of the tokens, [s, b]; by default 0, or none where they are token ids.
            sequence: run on sequence shards (SP).
        """
        length = len(tokens)
        positions = inputs.positions
        if positions is None:
            positions = torch.arange(inputs.past, inputs.past + length, device=tokens.device)[None]
        stream = self.embedding(tokens, positions.t(), types, sequence=sequence)
        context = self.context(length, stream, inputs, sequence=sequence)
        for layer in self.layers:
            # By keyword: recomputation takes positional arguments for tensors to store and
            # differentiate.
            stream = layer(stream, context=context)
        return self.final_norm(stream)
