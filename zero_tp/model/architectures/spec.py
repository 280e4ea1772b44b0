"""TransformerSpec: the choices that define one transformer, without any Hugging Face name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zero_tp.base.errors import ConfigError
from zero_tp.parallel.topology import nearest_divisors

MLP_MATRICES = {"mlp": 2, "xielu": 2, "gated": 3, "experts": 3}
"""Name of an MLP → the number of its matrices, or of one expert's: up, down, and a gate's."""


CHUNK = 64
"""Tokens of a chunk of the gated delta rule, as in transformers and in `fla`."""
FLEX_HEAD_SIZES = range(16, 257, 16)
"""Of the kernels of `flex_attention`; with others the scores are computed eagerly."""
CORRECTED_ROUTERS = ("sigmoid", "biased_softmax")
"""Names of the routers that choose by scores and a bias."""


@dataclass(frozen=True)
class Dropouts:
    """Dropout probabilities: after the embedding, at the end of each residual branch, on the
    attention weights.
    """

    embedding: float = 0.0
    residual: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class Rotary:
    """Rotary positions turn queries and keys (RoFormer, arXiv 2104.09864, section 3.4).

    Attributes:
        frequencies: (length of the sequence so far, device) → (radians per position, fp32 [size /
            2], factor of cosine and sine).
        size: number of features of each head that rotate.
        by_length: the frequencies depend on the sequence length (dynamic scaling).
        neighbours: features 2i and 2i + 1 turn together, not i and i + size/2.
        last: the last features of each head rotate, not the first.
        arithmetic: where 16-bit activations are rounded: "activations" rounds cosine, sine and each
            product; "rounded_tables" cosine and sine, and then only the sum of the fp32 products;
            "fp32" that sum only.
    """

    frequencies: Callable[[int, torch.device], tuple[Tensor, float]]
    size: int
    by_length: bool = False
    neighbours: bool = False
    last: bool = False
    arithmetic: Literal["activations", "rounded_tables", "fp32"] = "activations"


@dataclass(frozen=True)
class ExpertsSpec:
    """The mixture of experts in a layer's MLP.

    Attributes:
        count: experts per layer.
        per_token: experts per token.
        size: width of each.
        normalised: the weights of a token's experts sum to 1.
        loss_weight: coefficient of the load-balancing loss; None disables it.
        shared: width of the expert that computes every token; 0 means none.
        shared_gate: a sigmoid of the token scales the shared expert's output.
        router: name in ROUTERS (model/moe.py).
        groups, groups_per_token: the experts of a layer are in groups of equal size, and a token
            has experts of that many of them; 1 and 1: it chooses among all.
        scale: factor of the weights, after they are normalised.
        smallest_sum: of a token's weights, by which the router "biased_softmax" divides them.
        bias: each expert's matrices have biases.
        swiglu: (α, limit) of a clamped SwiGLU; None: the activation of the gate, times up.
    """

    count: int
    per_token: int
    size: int
    normalised: bool
    loss_weight: float | None
    shared: int = 0
    shared_gate: bool = True
    router: str = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    smallest_sum: float = 0.0
    bias: bool = False
    swiglu: tuple[float, float] | None = None


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: queries, and keys with values, are products of narrow latents
    (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Attributes:
        query: width of the queries' latent; None: they are products of the hidden state.
        key_value: width of the latent of keys and values.
        rotated: features of a head's queries and keys that rotate, the last ones; all heads share
            those of the keys.
        value: features of a head's values.
        norm_epsilon: of the latents' norms.
    """

    query: int | None
    key_value: int
    rotated: int
    value: int
    norm_epsilon: float

    @property
    def width(self) -> int:
        """Return the features of a token that all heads share: its latents, and the keys' that
        rotate.
        """
        return (self.query or 0) + self.key_value + self.rotated


@dataclass(frozen=True)
class GatedDeltaSpec:
    """The linear attention of layers whose mixer is "gated_delta" (arXiv 2412.06464).

    Attributes:
        key_heads, value_heads: each key head, which also has a query, serves value_heads /
            key_heads value heads.
        key_size, value_size: features of a key, and of a value.
        kernel: tokens that the short convolution sees, the present one included.
        norm_epsilon: of the norm of a head's output.
        largest_beta: a token replaces up to this share of what its key reads from the state; above
            1 the state's transition has negative eigenvalues (arXiv 2411.12537).
        initial_decay: (lowest, highest) initial exp(A_log), drawn uniformly.
        initial_step: (lowest, highest) initial softplus(dt_bias), whose logarithm is drawn
            uniformly, and its floor; None: dt_bias is 1.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    kernel: int
    norm_epsilon: float
    largest_beta: float = 1.0
    initial_decay: tuple[float, float] = (0.01, 16.0)
    initial_step: tuple[float, float, float] | None = None

    @property
    def keys(self) -> int:
        """Return the features of all keys, or of all queries."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """Return the features of all values."""
        return self.value_heads * self.value_size

    @property
    def columns(self) -> int:
        """Return the outputs of the products of the hidden state: queries and keys, values and
        their gate, and each value head's decay and share.
        """
        return 2 * (self.keys + self.values + self.value_heads)


@dataclass(frozen=True)
class TransformerSpec:
    """The choices that define one transformer.

    Tables in model/ (NORMS, LAYERS, MIXERS, MLPS) map the names to classes.

    Attributes:
        hidden, layers, heads, kv_heads, head_size, mlp_size, vocabulary: sizes (h, L, a, k, d, 4h,
            v); each of k pairs of keys and values serves a/k heads (arXiv 2305.13245).
        positions: longest sequence that the model was designed for; learned positions end there.
        norm, layer: names in the tables NORMS, LAYERS.
        position: "learned" or "rotary".
        mlps: a name in MLPS for each layer.
        mixers: a name in MIXERS for each layer: how tokens read others.
        gated_delta: settings of the layers whose mixer is "gated_delta".
        mixed_layers: a name in LAYERS for each layer, if they differ; else all are `layer`.
        experts: settings of the layers whose MLP is "experts"; `mlp_size` is the width of dense
            MLPs.
        latent: settings of latent attention; None: Q, K and V are products of the hidden state.
        rotaries: for each layer, settings of the position "rotary"; None: it does not rotate.
        activation: the MLP's elementwise function.
        qkv_bias, output_bias, mlp_bias: which linear layers have biases; of latent attention
            the projections to latents.
        output_gate: the query projection also makes a gate for each feature, whose sigmoid scales
            the attention's output.
        query_key_norm: a norm of queries and keys, over each head's d features ("heads") or all
            heads' ("whole").
        rotates_before_norm: queries and keys are rotated, then normed.
        attention_scale: factor of the scores; by default 1/√d.
        score_cap, logit_cap: limits of scores and logits, cap · tanh(x / cap).
        sinks: each head has a learnt score of a key without a value.
        logit_scale: factor of the logits.
        embedding_scale: factor of the word embedding, for a dtype of the activations.
        residual_scale: factor of a branch's output, of the layer "scaled".
        clip: queries, keys and values are limited to [-clip, clip].
        windows: for each layer, the number of tokens that a token attends to, itself included;
            None: no limit.
        causal: a token attends only to earlier tokens, and the model has a language-model head.
            Otherwise it attends to its whole row, and the model has the heads of masked pretraining
            (model/head.py).
        sentence_head: the encoder has a pooler and a sentence head.
        token_types: rows of the token type embedding; 0 means none.
        word_token_types: token types are token ids, and the word embedding has their vectors.
        embedding_norm: a norm follows the sum of the embeddings.
        tied: whether the output layer is the word embedding.
        padding_token: its row of the word embedding starts as zeros and gets no gradient from the
            look-up.
        init_std: standard deviation of initial weights.
        embedding_std: that of the word embedding; by default init_std.
        residual_std: that of the weights that end a residual branch.
        attention_output_std: that of the attention's output projection; by default residual_std.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mlp_size: int
    vocabulary: int
    positions: int
    norm: str
    norm_epsilon: float
    position: Literal["learned", "rotary"]
    mlps: tuple[str, ...]
    activation: Callable[[Tensor], Tensor]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool
    init_std: float
    residual_std: float
    dropouts: Dropouts
    windows: tuple[int | None, ...]
    rotaries: tuple[Rotary | None, ...]
    mixers: tuple[str, ...]
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None
    gated_delta: GatedDeltaSpec | None = None
    layer: str = "sequential"
    mixed_layers: tuple[str, ...] = ()
    output_gate: bool = False
    query_key_norm: Literal["none", "heads", "whole"] = "none"
    clip: float | None = None
    padding_token: int | None = None
    attention: Literal["sdpa", "eager", "soft_cap", "sinks", "flex_attention", "flex_sinks"] = (
        "sdpa"
    )
    rotates_before_norm: bool = False
    attention_scale: float | None = None
    score_cap: float | None = None
    sinks: bool = False
    logit_cap: float | None = None
    logit_scale: float = 1.0
    embedding_scale: Callable[[torch.dtype], float] | None = None
    residual_scale: float = 1.0
    attention_output_std: float | None = None
    embedding_std: float | None = None
    causal: bool = True
    sentence_head: bool = False
    token_types: int = 0
    word_token_types: bool = False
    embedding_norm: bool = False

    def __post_init__(self) -> None:
        if self.position != "rotary" and any(self.rotaries):
            raise ValueError(f"position {self.position!r} with rotaries {self.rotaries}")

    def stores_scores(self, *, flash: bool) -> bool:
        """Return whether backward keeps the attention's probabilities, s · s a head.

        Args:
            flash: the device has the kernels of `flex_attention`, else its scores are computed
                eagerly.
        """
        if self.is_flex:
            return not (flash and self.fits_flex)
        return self.attention != "sdpa"

    @property
    def value_size(self) -> int:
        """Return the features of a head's values, and of its output."""
        return self.head_size if self.latent is None else self.latent.value

    @property
    def is_flex(self) -> bool:
        """Return whether the attention is `flex_attention` where its kernels compute it."""
        return self.attention in ("flex_attention", "flex_sinks")

    @property
    def has_flex_core(self) -> bool:
        """Return whether SDPA lacks this attention and `flex_attention` has it."""
        return self.score_cap is not None or self.sinks

    @property
    def fits_flex(self) -> bool:
        """Return whether the kernels of `flex_attention` compute this model's training forwards.

        They have no dropout.
        """
        return self.dropouts.attention == 0 and self.head_size in FLEX_HEAD_SIZES

    @property
    def fuses_qkv(self) -> bool:
        """Return whether Q, K and V are one weight, whose parts TP splits alike."""
        return self.kv_heads == self.heads and not self.output_gate

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Return each layer's name in LAYERS."""
        return self.mixed_layers or (self.layer,) * self.layers

    def mixed_by(self, mixer: str) -> tuple[int, ...]:
        """Return the numbers of the layers with this mixer."""
        return tuple(number for number, name in enumerate(self.mixers) if name == mixer)

    @property
    def attention_share(self) -> float:
        """Return the share of the layers that have attention; the others have the delta rule."""
        if unknown := set(self.mixers) - {"attention", "gated_delta"}:
            raise ValueError(f"FLOPs, time and memory of the mixers {unknown} are not known")
        return len(self.mixed_by("attention")) / len(self.mixers)

    @property
    def mlp_matrices(self) -> int:
        """Return the number of matrices of one MLP, or of one expert (`MLP_MATRICES`)."""
        for name in self.mlps:
            if name not in MLP_MATRICES:
                raise ValueError(
                    f"the MLP {name!r} has no number of matrices; add it to MLP_MATRICES"
                )
        numbers = {MLP_MATRICES[name] for name in self.mlps}
        if len(numbers) != 1:
            raise ValueError(f"MLPs of {self.mlps} have different numbers of matrices")
        return numbers.pop()

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers whose MLP is a mixture of experts."""
        return tuple(number for number, mlp in enumerate(self.mlps) if mlp == "experts")

    @property
    def has_correction_bias(self) -> bool:
        """Return whether routers add a bias to the scores by which they choose."""
        return self.experts is not None and self.experts.router in CORRECTED_ROUTERS

    @property
    def dense_layers(self) -> tuple[int, ...]:
        return tuple(number for number in range(self.layers) if number not in self.expert_layers)

    @property
    def active_width(self) -> float:
        """Return the width of all MLPs that compute a token in a layer, a mean over layers."""
        experts = self.experts
        dense = len(self.dense_layers) * self.mlp_size
        chosen = 0 if experts is None else experts.per_token * experts.size + experts.shared
        return (dense + len(self.expert_layers) * chosen) / self.layers

    @property
    def idle_parameters(self) -> int:
        """Return the parameters of experts that do not compute a given token."""
        if self.experts is None:
            return 0
        size = self.experts.size
        one = self.mlp_matrices * self.hidden * size
        if self.experts.bias:
            one += (self.mlp_matrices - 1) * size + self.hidden
        return len(self.expert_layers) * one * (self.experts.count - self.experts.per_token)

    def check_qk_clip(self) -> None:
        """Check that scaling the rows of Q and K scales the scores, for QK-clip."""
        problem = ""
        if self.query_key_norm != "none":
            problem = "this model norms Q and K, which undoes a scale of their weights"
        elif self.clip is not None:
            problem = "this model limits Q and K (clip_qkv), so scores do not follow their weights"
        elif self.score_cap is not None:
            problem = "this model caps its scores, which bounds them already"
        elif self.is_flex:
            problem = 'the masks of flex_attention are not read; with "sdpa" it works'
        elif self.gated_delta is not None:
            problem = "layers of linear attention have no softmax, whose scores it bounds"
        elif not self.causal:
            problem = "an encoder's rows are padded, and scores of padding would count"
        if problem:
            raise ConfigError("zero_tp.training.qk_clip_threshold", problem, "leave it out")

    def check(self, tensor: int, expert: int = 1, data: int | None = None) -> None:
        """Check that TP and EP can split the model. KV heads need not be a multiple of `tensor`
        (model/qkv.py).

        Args:
            tensor, expert: TP and EP degrees.
            data: DP degree, if it is known: a remedy names EP degrees that divide it too.
        """
        if expert > 1:
            self._check_expert(expert, data)
        sizes = {"heads": self.heads, "MLP width": self.mlp_size if self.dense_layers else 0}
        if self.experts is not None:
            sizes |= {"expert width": self.experts.size, "shared expert width": self.experts.shared}
            # Each rank has some features of the second matrices' biases.
            sizes |= {"hidden size": self.hidden if self.experts.bias else 0}
        if self.gated_delta is not None and self.mixed_by("gated_delta"):
            # A rank has whole key heads, and the value heads that they serve.
            sizes["linear key heads"] = self.gated_delta.key_heads
        for name, size in sizes.items():
            if size % tensor:
                mismatch = f"{name} {size} ≠ tensor {tensor} × {size / tensor:.4g} a rank"
                raise ConfigError(
                    "zero_tp.parallel.tensor", mismatch, f"use a tensor degree that divides {size}"
                )

    def _check_expert(self, expert: int, data: int | None) -> None:
        key = "zero_tp.parallel.expert"
        if self.experts is None:
            raise ConfigError(key, f"{expert}, but the model has no experts", "leave it out")
        count = self.experts.count
        if count % expert:
            near = nearest_divisors(expert, count, data or count)
            problem = f"{count} experts do not divide over {expert} ranks"
            raise ConfigError(key, problem, f"use {near}")
