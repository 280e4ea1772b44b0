"""What the descendants of Llama share: RMSNorm, rotary positions, gated MLP, grouped queries, and their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from zero_tp.errors import UserError
from zero_tp.models.architectures.common import (
    ACTIVATIONS,
    ROPE_UNDECLARED,
    TOKENS,
    activation,
    attention_of,
    dropout_of,
    rotary,
    whole_head_size,
)
from zero_tp.models.architectures.table import Architecture, Fields, Weight
from zero_tp.models.spec import Dropouts, TransformerSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def fields(
    *,
    sizes: tuple[str, ...] = (),
    read: tuple[str, ...] = (),
    fixed: Mapping[str, tuple[Any, str]] | None = None,
    irrelevant: Mapping[str, str] | None = None,
    undeclared: Mapping[str, Any] | None = None,
) -> Fields:
    """The fields that all of them have, and those that one adds."""
    return Fields(
        sizes=(
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            *sizes,
        ),
        positive=("initializer_range", "rms_norm_eps"),
        dropouts=("attention_dropout",),
        choices={"hidden_act": tuple(ACTIVATIONS)},
        read=("tie_word_embeddings", "rope_parameters", "pad_token_id", *read),
        fixed=fixed or {},
        irrelevant={**TOKENS, **(irrelevant or {})},
        undeclared={**ROPE_UNDECLARED, **(undeclared or {})},
    )


def spec(
    config: PretrainedConfig,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    query_key_norm: bool = False,
    windows: tuple[int | None, ...] | None = None,
) -> TransformerSpec:
    """
    Args:
        windows: of each layer; by default every token sees all before it.

    Raises:
        UserError: a field whose value is not computed.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise UserError(
            f"zero_tp.model.num_key_value_heads: {heads} attention heads ≠ {kv_heads} KV heads × {heads / kv_heads:.4g}"
            " each; give a divisor of num_attention_heads"
        )
    head_size = getattr(config, "head_dim", None) or whole_head_size(config)
    return TransformerSpec(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        mlp_size=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        norm="rms_norm",
        norm_epsilon=config.rms_norm_eps,
        position="rotary",
        rotary=rotary(config, head_size),
        mlp="gated",
        activation=activation(config.hidden_act, "hidden_act"),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        query_key_norm=query_key_norm,
        tied=config.tie_word_embeddings,
        padding_token=config.pad_token_id,
        init_std=config.initializer_range,
        residual_std=config.initializer_range,
        dropouts=Dropouts(attention=dropout_of(config, "attention_dropout")),
        windows=windows or (None,) * config.num_hidden_layers,
        attention=attention_of(config),
    )


def windows_by_layer(config: PretrainedConfig) -> tuple[int | None, ...]:
    """From `layer_types`.

    Raises:
        UserError: a type that is not computed, too few or too many, a sliding layer without a window.
    """
    types, key = list(config.layer_types), "zero_tp.model.layer_types"
    if len(types) != config.num_hidden_layers:
        raise UserError(f"{key}: {len(types)} entries for {config.num_hidden_layers} layers; give one for each")
    for kind in types:
        if kind not in (FULL, SLIDING):
            raise UserError(f"{key}: {kind!r} is not supported; one of {FULL}, {SLIDING}")
    if SLIDING in types and config.sliding_window is None:
        raise UserError(f"{key}: {SLIDING} needs sliding_window, and use_sliding_window: true")
    return tuple(config.sliding_window if kind == SLIDING else None for kind in types)


_OURS, _THEIRS = "transformer.layers.{layer}.", "model.layers.{layer}."


def _linear(ours: str, *theirs: str, bias: bool) -> Iterator[Weight]:
    for name in ("weight", "bias") if bias else ("weight",):
        yield Weight(f"{_OURS}{ours}.{name}", tuple(f"{_THEIRS}{each}.{name}" for each in theirs))


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Every parameter of a model of this spec."""
    queries, keys, values = (f"self_attn.{letter}_proj" for letter in "qkv")
    found = [Weight("transformer.embedding.word.weight", "model.embed_tokens.weight")]
    found += _linear("attention_norm", "input_layernorm", bias=False)
    if spec.kv_heads == spec.heads:
        found += _linear("attention.qkv", queries, keys, values, bias=spec.qkv_bias)
    else:
        for ours, theirs in (("query", queries), ("key", keys), ("value", values)):
            found.append(Weight(f"{_OURS}attention.qkv.{ours}", f"{_THEIRS}{theirs}.weight"))
            if spec.qkv_bias:
                found.append(Weight(f"{_OURS}attention.qkv.{ours}_bias", f"{_THEIRS}{theirs}.bias"))
    if spec.query_key_norm:
        found += _linear("attention.query_norm", "self_attn.q_norm", bias=False)
        found += _linear("attention.key_norm", "self_attn.k_norm", bias=False)
    found += _linear("attention.output", "self_attn.o_proj", bias=spec.output_bias)
    found += _linear("mlp_norm", "post_attention_layernorm", bias=False)
    found += _linear("mlp.gate_up", "mlp.gate_proj", "mlp.up_proj", bias=spec.mlp_bias)
    found += _linear("mlp.down", "mlp.down_proj", bias=spec.mlp_bias)
    found += [Weight("transformer.final_norm.weight", "model.norm.weight"), Weight("head.weight", "lm_head.weight")]
    return tuple(found)


def architecture(fields: Fields, spec: Any, native_class: str) -> Architecture:
    """The table of a descendant: its own fields and spec, the names that all have."""
    return Architecture(
        fields=fields,
        translate=spec,
        weights=weights,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        native_class=native_class,
        base_prefix="model.",
        old=(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",),  # the frequencies, computed from the config
    )
