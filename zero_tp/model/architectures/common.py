"""The parts that architecture tables share: Llama's fields, spec and weights, from which most
decoders differ little.

Llama has RMSNorm, rotary positions, gated MLPs and grouped queries. Fields are read by Hugging
Face's general names (`hidden_size`), which every config class maps to its own (`n_embd`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, shown
from zero_tp.model.architectures import llama_names
from zero_tp.model.architectures.fields import FIXED_IN_DECODERS, IRRELEVANT_IN_DECODERS, Fields
from zero_tp.model.architectures.rotary import ROPE, ROPE_UNDECLARED, rotaries
from zero_tp.model.architectures.spec import Dropouts, ExpertsSpec, Rotary, TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

# gelu_new is the tanh approximation; torch's fused one saves one tensor where transformers' saves
# four.
_gelu_tanh = partial(F.gelu, approximate="tanh")


def _relu_squared(tensor: Tensor) -> Tensor:
    return F.relu(tensor).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": _relu_squared,
    "silu": F.silu,
    "swish": F.silu,
}

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""The sizes that most configs have, under the general names."""

FULL = "full_attention"
SLIDING = "sliding_attention"


def fields(
    *,
    sizes: tuple[str, ...] = ("num_key_value_heads",),
    epsilon: str = "rms_norm_eps",
    positive: tuple[str, ...] = (),
    dropouts: tuple[str, ...] = (),
    activation: str = "hidden_act",
    choices: Mapping[str, tuple[str, ...]] | None = None,
    read: tuple[str, ...] = ("pad_token_id",),
    fixed: Mapping[str, tuple[Any, str]] | None = None,
    irrelevant: Mapping[str, str] | None = None,
    undeclared: Mapping[str, Any] | None = None,
    quantizations: tuple[str, ...] = (),
) -> Fields:
    """Return Llama's fields and those that one architecture adds.

    `sizes` and `read` replace their defaults, so they repeat `num_key_value_heads` and
    `pad_token_id`; the others add to Llama's.

    Args:
        epsilon, activation: names of the fields of the norms' epsilon and the MLPs' activation. For
            the others see Fields.
    """
    return Fields(
        sizes=(*SIZES, *sizes),
        positive=("initializer_range", epsilon, *positive),
        dropouts=("attention_dropout", *dropouts),
        choices={activation: tuple(ACTIVATIONS), **(choices or {})},
        read=("tie_word_embeddings", *ROPE, *read),
        fixed={**FIXED_IN_DECODERS, **(fixed or {})},
        irrelevant={**IRRELEVANT_IN_DECODERS, **(irrelevant or {})},
        undeclared={**ROPE_UNDECLARED, **(undeclared or {})},
        quantizations=quantizations,
    )


def spec(
    config: PretrainedConfig,
    *,
    partial_rotary: bool = False,
    rotates: Sequence[bool] | None = None,
    mlp: str = "gated",
    attention_bias: bool | None = None,
    **overrides: Any,
) -> TransformerSpec:
    """Return the spec of a config.

    A field that a config class lacks has Llama's value.

    Args:
        partial_rotary: the architecture supports rotating a part of each head.
        rotates: whether each layer rotates Q and K; by default all do.
        mlp: name in MLPS, for a config without `decoder_sparse_step`.
        attention_bias: biases on Q, K, V and the output projection; by default the config's.
        overrides: arguments of TransformerSpec that differ from Llama's.
    """
    layers = config.num_hidden_layers
    std = config.initializer_range
    padding = config.pad_token_id
    # Only config classes with layers of both kinds have that field.
    mlps = sparse_mlps(config) if hasattr(config, "decoder_sparse_step") else (mlp,) * layers
    heads, kv_heads, head_size = grouped_heads(config)
    attention = "eager" if config._attn_implementation == "eager" else "sdpa"
    is_flex = config._attn_implementation == "flex_attention"
    # No kernel of SDPA caps scores or has sinks; transformers' SDPA leaves the cap out.
    if overrides.get("score_cap") is not None:
        attention = "flex_attention" if is_flex else "soft_cap"
    elif overrides.get("sinks"):
        attention = "flex_sinks" if is_flex else "sinks"
    if attention_bias is None:
        attention_bias = getattr(config, "attention_bias", False)
    if "rotaries" in overrides:
        assert rotates is None and not partial_rotary, "`rotaries` says it for each layer"
    elif overrides.get("position") == "learned":
        overrides["rotaries"] = (None,) * layers  # its config has no rotary fields
    else:
        overrides["rotaries"] = _rotaries(config, rotates, partial_rotary)
    defaults: dict[str, Any] = {
        "hidden": config.hidden_size,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "mlp_size": getattr(config, "intermediate_size", None),
        "vocabulary": config.vocab_size,
        "positions": config.max_position_embeddings,
        "position": "rotary",
        "norm": "rms_norm",
        "norm_epsilon": getattr(config, "rms_norm_eps", None),
        "mlps": mlps,
        "experts": experts(config) if "experts" in mlps else None,
        "activation": ACTIVATIONS.get(getattr(config, "hidden_act", "")),
        "clip": getattr(config, "clip_qkv", None),
        "qkv_bias": getattr(config, "qkv_bias", attention_bias),
        "output_bias": attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "tied": config.tie_word_embeddings,
        # As in torch, a negative id counts from the end of the vocabulary.
        "padding_token": padding + config.vocab_size
        if padding is not None and padding < 0
        else padding,
        "init_std": std,
        "residual_std": std,
        "dropouts": dropouts(config, attention="attention_dropout"),
        "windows": windows_by_layer(config),
        "mixers": ("attention",) * layers,
        "attention": attention,
    }
    return TransformerSpec(**{**defaults, **overrides})


def experts(config: PretrainedConfig) -> ExpertsSpec:
    """Return the mixture of experts. As in transformers, `output_router_logits` turns on the
    load-balancing loss.
    """
    count = config.num_experts
    per_token = config.num_experts_per_tok
    check_experts_per_token("num_experts_per_tok", per_token, count)
    return ExpertsSpec(
        count,
        per_token,
        size=getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        # Mixtral's class has no such field and normalises; another table passes its own spec.
        normalised=getattr(config, "norm_topk_prob", True),
        loss_weight=config.router_aux_loss_coef if config.output_router_logits else None,
        shared=getattr(config, "shared_expert_intermediate_size", 0),
    )


def check_experts_per_token(field: str, per_token: int, count: int) -> None:
    """Check that a layer has as many experts as the config's field chooses for a token."""
    if per_token > count:
        problem = f"{per_token} experts a token, of {count} in a layer"
        raise ConfigError(f"{MODEL_KEY}.{field}", problem, f"give at most {count}")


def sparse_mlps(config: PretrainedConfig) -> tuple[str, ...]:
    """Return each layer's MLP, from `mlp_only_layers` and `decoder_sparse_step`."""
    step = config.decoder_sparse_step
    dense = config.mlp_only_layers
    layers = range(config.num_hidden_layers)
    # With step 2 and layer 3 listed as dense: gated, experts, gated, gated.
    mlps = tuple("gated" if n in dense or (n + 1) % step else "experts" for n in layers)
    if "experts" not in mlps:
        name = "decoder_sparse_step" if step > len(layers) else "mlp_only_layers"
        raise ConfigError(
            f"{MODEL_KEY}.{name}", "no layer has experts", "take the model_type without experts"
        )
    return mlps


def dropouts(config: PretrainedConfig, **fields: str) -> Dropouts:
    """Return the probabilities in the named fields of the config; None is 0."""
    return Dropouts(
        **{place: float(getattr(config, field, None) or 0.0) for place, field in fields.items()}
    )


def head_size_of(config: PretrainedConfig) -> int:
    """Return the features of a head."""
    return grouped_heads(config)[2]


def grouped_heads(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return heads, KV heads and head size."""
    hidden = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    if kv_heads is None:
        raise ConfigError(
            f"{MODEL_KEY}.num_key_value_heads",
            "null, with which transformers fails",
            f"give {heads}",
        )
    if heads % kv_heads:
        mismatch = f"{heads} attention heads ≠ {kv_heads} KV heads × {heads / kv_heads:.4g} each"
        raise ConfigError(
            f"{MODEL_KEY}.num_key_value_heads", mismatch, "give a divisor of num_attention_heads"
        )
    head_size = getattr(config, "head_dim", None)
    if not head_size and hidden % heads:
        mismatch = f"hidden size {hidden} ≠ heads {heads} × head size {hidden / heads:.4g}"
        key = f"{MODEL_KEY}.{config.attribute_map.get('hidden_size', 'hidden_size')}"
        raise ConfigError(key, mismatch, "give a hidden size that is a multiple of the heads")
    return heads, kv_heads, head_size or hidden // heads


def windows_by_layer(config: PretrainedConfig) -> tuple[int | None, ...]:
    """Return each layer's window, from `layer_types` if the config class has it."""
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if not hasattr(config, "layer_types"):
        return (window,) * layers
    types = list(config.layer_types)
    if len(types) != layers:
        raise ConfigError(
            f"{MODEL_KEY}.layer_types",
            f"{len(types)} entries for {layers} layers",
            "give one for each",
        )
    if SLIDING in types and (window or 0) < 1:
        problem = f"{shown(window)} is not positive, which {SLIDING} needs"
        flag = " and use_sliding_window: true" if hasattr(config, "use_sliding_window") else ""
        remedy = f"give 1 or more{flag}, or no {SLIDING} layer"
        raise ConfigError(f"{MODEL_KEY}.sliding_window", problem, remedy)
    return tuple(window if kind == SLIDING else None for kind in types)


def require_window(config: PretrainedConfig) -> None:
    """Refuse a config without a window, for a class that makes the mask of windows in any case."""
    if config.sliding_window is None:
        remedy = "give a number; with layer_types of full_attention alone it changes nothing"
        problem = "null, with which transformers fails"
        raise ConfigError(f"{MODEL_KEY}.sliding_window", problem, remedy)


def multi_token(pattern: str) -> dict[str, str]:
    """Return `untrained_parts` for the tensors that predict further tokens, by their names."""
    return {pattern: "multi-token prediction"}


def _rotaries(
    config: PretrainedConfig, rotates: Sequence[bool] | None, partial_rotary: bool
) -> tuple[Rotary | None, ...]:
    """Return each layer's rotary positions; see `spec`."""
    of_layers = rotaries(config, head_size_of(config), partial_rotary=partial_rotary)
    if rotates is None:
        return of_layers
    return tuple(
        rotary if is_used else None for rotary, is_used in zip(of_layers, rotates, strict=True)
    )


def architecture(
    fields: Fields,
    spec: Callable[[PretrainedConfig], TransformerSpec],
    native_class: str,
    weights: Callable[[TransformerSpec], tuple[Weight, ...]] = llama_names.weights,
    obsolete_tensors: tuple[str, ...] = (),
    **attributes: Any,
) -> Architecture:
    """Return the table of a decoder whose weights have Llama's names, or `weights`.

    Args:
        obsolete_tensors: more than those of every decoder.
        attributes: others of Architecture.
    """
    return Architecture(
        fields=fields,
        translate=spec,
        weights=weights,
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        native_class=native_class,
        base_prefix="model.",
        obsolete_tensors=(
            r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",  # computed from the config
            *obsolete_tensors,
        ),
        **attributes,
    )
