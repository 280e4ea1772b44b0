"""qwen3_next is Hugging Face's Qwen3NextForCausalLM: three of four layers have the gated delta rule
instead of attention, the others a gate of their output; norms of 1 + w, and experts.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common, llama_names, qwen2_moe
from zero_tp.model.architectures.delta_names import (
    delta_weights,
    grouped_projection,
    mixer_weights,
)
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import GatedDeltaSpec, TransformerSpec
from zero_tp.model.architectures.table import Weight

LINEAR = "linear_attention"
SIZES = (
    "num_key_value_heads",
    "head_dim",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
IRRELEVANT = {"full_attention_interval": "layer_types decides, which the class makes of it"}
UNDECLARED = {"full_attention_interval": int}
CHOICES = {"layer_types": (common.FULL, LINEAR)}

FIELDS = common.fields(
    sizes=(*SIZES, "shared_expert_intermediate_size", *qwen2_moe.SIZES),
    choices=CHOICES,
    read=(*qwen2_moe.READ, "attention_bias"),
    irrelevant=IRRELEVANT,
    undeclared=UNDECLARED,
)


def mixers(config: PretrainedConfig) -> tuple[str, ...]:
    """Return each layer's mixer, from `layer_types`."""
    types = list(config.layer_types)
    key = f"{MODEL_KEY}.layer_types"
    if len(types) != config.num_hidden_layers:
        problem = f"{len(types)} entries for {config.num_hidden_layers} layers"
        raise ConfigError(key, problem, "give one for each")
    if common.FULL not in types:
        # Caches count the tokens by a layer that keeps keys.
        raise ConfigError(key, f"no layer has {common.FULL}", "give one at least")
    return tuple("gated_delta" if kind == LINEAR else "attention" for kind in types)


def gated_delta(config: PretrainedConfig, **differences: Any) -> GatedDeltaSpec:
    """Return the settings of linear attention, with those given."""
    keys = config.linear_num_key_heads
    values = config.linear_num_value_heads
    if values % keys:
        mismatch = f"{values} value heads ≠ {keys} key heads × {values / keys:.4g} each"
        remedy = "give a multiple of linear_num_key_heads"
        raise ConfigError(f"{MODEL_KEY}.linear_num_value_heads", mismatch, remedy)
    settings = {"norm_epsilon": config.rms_norm_eps, **differences}
    return GatedDeltaSpec(
        key_heads=keys,
        value_heads=values,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
        **settings,
    )


def spec(
    config: PretrainedConfig, *, unread: tuple[str, ...] = (), **differences: Any
) -> TransformerSpec:
    """Return Llama's spec with the differences of Qwen3-Next and Qwen3.5, and those given.

    Args:
        unread: see `rotary`.
    """
    head_size = common.head_size_of(config)
    return common.spec(
        config,
        rotaries=rotaries(config, head_size, partial_rotary=True, unread=unread),
        norm="offset_rms_norm",
        query_key_norm="heads",
        output_gate=True,
        mixers=mixers(config),
        gated_delta=gated_delta(config),
        **differences,
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    of_delta = delta_weights(grouped_projection(spec))
    return llama_names.weights(spec, mixer_weights(spec, of_delta))


MULTI_TOKEN = common.multi_token(r"mtp\..*")
ARCHITECTURE = common.architecture(
    FIELDS, spec, "Qwen3NextForCausalLM", weights, untrained_parts=MULTI_TOKEN
)
