"""The attention of DeepSeek-V3 and its relatives: multi-head latent attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures.llama_names import HF_LAYER, OUR_LAYER, layer_weights, norm_weights
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import LatentSpec, TransformerSpec
from zero_tp.model.architectures.table import Weight

SIZES = (
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
READ = ("pad_token_id", "attention_bias", "rope_interleave")
IRRELEVANT = {
    "qk_head_dim": "the class adds its two parts",
    "pretraining_tp": "the class does not read it",
}
NORM_EPSILON = 1e-6
"""Of the latents' norms: the classes do not give them the config's `rms_norm_eps`."""


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of TransformerSpec that describe the attention."""
    _check_heads(config)
    rotated = config.qk_rope_head_dim
    size = config.qk_nope_head_dim + rotated
    return {
        "head_size": size,
        "kv_heads": config.num_attention_heads,
        "latent": LatentSpec(
            config.q_lora_rank, config.kv_lora_rank, rotated, config.v_head_dim, NORM_EPSILON
        ),
        "rotaries": rotaries(config, rotated, neighbours=bool(config.rope_interleave), last=True),
        "attention_scale": size**-0.5 * _score_factor(config.rope_parameters),
        "qkv_bias": config.attention_bias,
    }


def _check_heads(config: PretrainedConfig) -> None:
    heads = config.num_attention_heads
    if config.num_key_value_heads != heads:
        problem = f"{config.num_key_value_heads}, but each of the {heads} heads has its own keys"
        raise ConfigError(f"{MODEL_KEY}.num_key_value_heads", problem, f"give {heads}")
    if config.head_dim != config.qk_rope_head_dim:
        problem = f"{config.head_dim}, but the classes turn so many features of a head"
        raise ConfigError(
            f"{MODEL_KEY}.head_dim", problem, f"give qk_rope_head_dim, {config.qk_rope_head_dim}"
        )
    if config.v_head_dim is None:
        problem = "null, with which transformers fails"
        raise ConfigError(f"{MODEL_KEY}.v_head_dim", problem, "give a number")


def _score_factor(parameters: dict[str, Any]) -> float:
    """Return the factor of the scores of longer sequences: YaRN's m² (arXiv 2309.00071, section
    3.4), with the weight `mscale_all_dim`.
    """
    weight = parameters.get("mscale_all_dim") or 0
    if parameters.get("rope_type", "default") == "default" or not weight:
        return 1.0
    factor = parameters["factor"]
    scale = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
    return float(scale * scale)


def weights(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield the weights of `self_attn` in every layer."""
    assert spec.latent is not None
    query = "q_proj"
    if spec.latent.query is not None:
        query = "q_b_proj"
        yield from _latent_weights(spec, "query_latent", "q_a_proj", "q_a_layernorm")
    names = ("key_value_latent", "kv_a_proj_with_mqa", "kv_a_layernorm")
    yield from _latent_weights(spec, *names)
    yield from layer_weights("attention.qkv.query", f"self_attn.{query}", bias=False)
    yield from layer_weights("attention.qkv.key_value", "self_attn.kv_b_proj", bias=False)
    yield from layer_weights("attention.output", "self_attn.o_proj", bias=spec.output_bias)


def _latent_weights(spec: TransformerSpec, our_name: str, down: str, norm: str) -> Iterator[Weight]:
    ours = f"attention.qkv.{our_name}"
    yield from layer_weights(f"{ours}.down", f"self_attn.{down}", bias=spec.qkv_bias)
    yield from norm_weights(spec, f"{OUR_LAYER}{ours}.norm", f"{HF_LAYER}self_attn.{norm}")
