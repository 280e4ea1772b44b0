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
from zero_tp.model.context import AttentionMask, ForwardContext, ForwardInputs, Mask
from zero_tp.model.gated_delta import GatedDeltaNet
from zero_tp.model.mlp import MLP, XIELUMLP, GatedMLP
from zero_tp.model.moe import Experts
from zero_tp.model.norm import NORMS
from zero_tp.model.position import LearnedEmbedding, compute_rotation
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
        word_init = init if spec.embedding_std is None else Normal(spec.embedding_std)
        self.tensor_rank = make.topology.tensor_rank
        self.word = VocabParallelEmbedding(
            make.child("word"),
            spec.vocabulary,
            spec.hidden,
            init=word_init,
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
        self.scale = spec.embedding_scale
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
        if self.scale is not None:
            stream = stream * self.scale(stream.dtype)
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
    "xielu": XIELUMLP,
    "gated": GatedMLP,
    "experts": Experts,
}


MIXERS: dict[str, type[Attention] | type[GatedDeltaNet]] = {
    "attention": Attention,
    "gated_delta": GatedDeltaNet,
}


class TransformerLayer(nn.Module):
    """The parts of a layer; subclasses connect them to the residual stream, whose shape they keep.

    Attributes:
        attention_norms, mlp_norms: names of the norms around each branch.
        recomputed_norms: norms whose outputs backward can recompute, each with the module that
            reads its output.
        ends_with_norm: the layer's output is normed, so that the model needs no final norm.
        splits_residual: norms of the residual stream return it, too (`residual_and_norm`).
        adds_in_norm: the attention's branch is added by the MLP's norm. Only the planner reads
            these two.
    """

    attention_norm: nn.Module
    attention_output_norm: nn.Module
    mlp_norm: nn.Module
    mlp_output_norm: nn.Module
    ends_with_norm: ClassVar[bool] = False
    splits_residual: ClassVar[bool] = False
    adds_in_norm: ClassVar[bool] = False
    attention_norms: ClassVar[tuple[str, ...]] = ("attention_norm",)
    mlp_norms: ClassVar[tuple[str, ...]] = ("mlp_norm",)
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
        self._make_norms(make, spec, self.attention_norms)
        mixer = MIXERS[spec.mixers[number]]
        self.attention = mixer(make.child("attention"), spec, streams, number)
        self._make_norms(make, spec, self.mlp_norms)
        self.mlp = MLPS[spec.mlps[number]](make.child("mlp"), spec)
        self.dropout = dropout
        self.scale = spec.residual_scale

    def _make_norms(
        self, make: ParameterMaker, spec: TransformerSpec, names: tuple[str, ...]
    ) -> None:
        sharded = make.topology.sequence
        for name in names:
            norm = NORMS[spec.norm](
                make.child(name), spec.hidden, spec.norm_epsilon, sharded_input=sharded
            )
            self.add_module(name, norm)


def residual_and_norm(
    norm: nn.Module, x: Tensor, branch: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the residual, x plus the branch if there is one, and its norm.

    Where the norm can, it adds them by itself, and its backward both gradients of the residual.
    """
    if getattr(norm, "passes_residual", False):
        residual, normed = norm(x, residual=True, branch=branch)
        # A view of an input that needs gradients claims to need them, too, where none is taken.
        return residual if torch.is_grad_enabled() else residual.detach(), normed
    x = x if branch is None else x + branch
    return x, norm(x)


class SequentialLayer(TransformerLayer):
    """Pre-norm: attention, then the MLP on its sum."""

    splits_residual = True
    adds_in_norm = True

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x, normed = residual_and_norm(self.attention_norm, x)
        branch = self.dropout(self.attention(normed, context=context))
        x, normed = residual_and_norm(self.mlp_norm, x, branch)
        return x + self.dropout(self.mlp(normed, context=context))


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


class SharedNormLayer(TransformerLayer):
    """Attention and MLP both read one norm of the layer's input (arXiv 2204.02311, section 2)."""

    mlp_norms = ()
    # Two modules read its output, so neither can drop it.
    recomputed_norms = ()

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        normed = self.attention_norm(x)
        x = x + self.dropout(self.attention(normed, context=context))
        return x + self.dropout(self.mlp(normed, context=context))


class ScaledLayer(TransformerLayer):
    """Pre-norm, each branch's output times the spec's `residual_scale`."""

    splits_residual = True

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x, normed = residual_and_norm(self.attention_norm, x)
        x = x + self.dropout(self.attention(normed, context=context)) * self.scale
        x, normed = residual_and_norm(self.mlp_norm, x)
        return x + self.dropout(self.mlp(normed, context=context)) * self.scale


class OutputNormLayer(TransformerLayer):
    """The branches' outputs are normed, their inputs are not (OLMo 2, arXiv 2501.00656, section
    3.2).
    """

    attention_norms = ("attention_output_norm",)
    mlp_norms = ("mlp_output_norm",)
    recomputed_norms = ()

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x = x + self.dropout(self.attention_output_norm(self.attention(x, context=context)))
        return x + self.dropout(self.mlp_output_norm(self.mlp(x, context=context)))


class SandwichLayer(TransformerLayer):
    """The branches' inputs and their outputs are normed (Gemma 2, arXiv 2408.00118, section 2)."""

    attention_norms = ("attention_norm", "attention_output_norm")
    mlp_norms = ("mlp_norm", "mlp_output_norm")
    splits_residual = True
    adds_in_norm = True

    def forward(self, x: Tensor, *, context: ForwardContext) -> Tensor:
        x, normed = residual_and_norm(self.attention_norm, x)
        attended = self.attention(normed, context=context)
        branch = self.dropout(self.attention_output_norm(attended))
        x, normed = residual_and_norm(self.mlp_norm, x, branch)
        return x + self.dropout(self.mlp_output_norm(self.mlp(normed, context=context)))


LAYERS: dict[str, type[TransformerLayer]] = {
    "sequential": SequentialLayer,
    "parallel": ParallelLayer,
    "post_norm": PostNormLayer,
    "shared_norm": SharedNormLayer,
    "scaled": ScaledLayer,
    "output_norm": OutputNormLayer,
    "sandwich": SandwichLayer,
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
            LAYERS[name](
                make.child(f"layers.{number}"),
                spec,
                streams,
                Dropout(spec.dropouts.residual, streams, stream),
                number,
            )
            for number, name in enumerate(spec.layer_names)
        )
        self.final_norm: nn.Module = nn.Identity()
        if not LAYERS[spec.layer_names[-1]].ends_with_norm:
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
        positions = _positions(inputs, length, like.device)
        build_mask = CORES[self.spec.attention].build_mask
        masks: dict[int | None, Mask] = {}
        for number in self.spec.mixed_by("attention"):
            window = self.spec.windows[number]
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
        # Layers may rotate differently, or not at all.
        rotaries = {rotary: None for rotary in self.spec.rotaries if rotary is not None}
        total_length = past + length
        if any(rotary.by_length for rotary in rotaries):
            if inputs.positions is not None:
                # Frequencies follow the positions that are used, not the number of tokens in this
                # forward.
                total_length = int(positions.max()) + 1
            total_length = self._scaled_length(total_length)
        rotations = {
            rotary: compute_rotation(rotary, positions, total_length, like.dtype)
            for rotary in rotaries
        }
        of_losses = inputs.router_losses, inputs.choice_count
        separations = self._separations(length, inputs)
        return ForwardContext(sequence, masks, rotations, cache, *of_losses, *separations)

    def _separations(
        self, length: int, inputs: ForwardInputs
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return `ForwardContext.sequence_ids` and `unpadded`, which layers without masks read."""
        if not self.spec.mixed_by("gated_delta"):
            return None, None
        ids = None if inputs.packed is None else inputs.packed.sequence_ids
        padding = inputs.padding_mask
        # A single token continues the cache and is no padding, as in transformers.
        if padding is None or length == 1:
            return ids, None
        return ids, padding[:, -length:].t().unsqueeze(-1)

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
        positions = _positions(inputs, length, tokens.device)
        stream = self.embedding(tokens, positions.t(), types, sequence=sequence)
        context = self.context(length, stream, inputs, sequence=sequence)
        for layer in self.layers:
            # By keyword: recomputation takes positional arguments for tensors to store and
            # differentiate.
            stream = layer(stream, context=context)
        return self.final_norm(stream)


def _positions(inputs: ForwardInputs, length: int, device: torch.device) -> Tensor:
    """Return the given positions, or those after the cached tokens, [b or 1, length]."""
    if inputs.positions is not None:
        return inputs.positions
    return torch.arange(inputs.past, inputs.past + length, device=device)[None]
