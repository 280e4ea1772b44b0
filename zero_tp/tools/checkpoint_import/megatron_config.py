"""The Hugging Face config of a model that Megatron-LM's args describe.

Source: megatron-core 0.16.1 (`transformer/transformer_config.py`); Megatron-LM's args have
the names of its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.errors import UserError
from zero_tp.tools.checkpoint_import.recorded_fields import REMEDY, RecordedFields, derive_config

# A setting that no family of these has, and that no tensor tells → its values in those that are
# read.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (None, False),
    "apply_layernorm_1p": (None, False),
    "hybrid_override_pattern": (None, ""),
    "heterogeneous_layers_config_path": (None, ""),
    "heterogeneous_layers_config_encoded_json": (None, ""),
    "experimental_attention_variant": (None,),
    "attention_output_gate": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "window_size": (None,),
    "no_rope_freq": (None,),
    "softmax_scale": (None,),
    "softmax_type": (None, "vanilla"),
    "qk_l2_norm": (None, False),
    "glu_linear_offset": (None, 0),
    "activation_func_clamp_value": (None,),
}
_PLAIN_EXPERTS: dict[str, tuple[Any, ...]] = {
    "moe_router_score_function": (None, "softmax"),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_layer_freq": (None, 1),
    "moe_router_group_topk": (None,),
    "moe_router_topk_scaling_factor": (None, 1),
    "moe_apply_probs_on_input": (None, False),
}


def config_of(args: Mapping[str, Any], vocabulary: int | None, folder: Path) -> PretrainedConfig:
    """Return the config of a model, from the args of its training.

    Args:
        vocabulary: of the tokenizer; by default that of the args, which may be padded.

    Raises:
        UserError: a size is missing, or no family that is derived here has such layers.
    """
    if not args:
        raise UserError(f"{folder}: has no args of its training; {REMEDY}")
    fields = RecordedFields(args, folder, "args.")
    model_type = _family(fields)
    epsilon = fields.number("norm_epsilon", fields.number("layernorm_epsilon", 1e-5))
    sizes = _sizes(fields)
    if model_type == "gpt2":
        known = {
            "n_embd": sizes["hidden_size"],
            "n_layer": sizes["num_hidden_layers"],
            "n_head": sizes["num_attention_heads"],
            "n_inner": sizes["intermediate_size"],
            "n_positions": sizes["max_position_embeddings"],
            "layer_norm_epsilon": epsilon,
            "activation_function": _gelu(fields),
        }
    else:
        known = {**sizes, **_rotary(fields), **_experts(fields, model_type)}
        known["rms_norm_eps"] = epsilon
        if model_type == "llama":
            bias = bool(fields.get("add_bias_linear"))
            known |= {"attention_bias": bias, "mlp_bias": bias}
    known["vocab_size"] = vocabulary or fields.get("vocab_size") or fields["padded_vocab_size"]
    known["tie_word_embeddings"] = not fields.get("untie_embeddings_and_output_weights", False)
    return derive_config(model_type, folder, known)


def _family(fields: RecordedFields) -> str:
    """Return the model_type whose class computes what the args describe."""
    for name, values in _PLAIN.items():
        fields.require(name, values)
    fields.require("normalization", ("LayerNorm", "RMSNorm"))
    if fields["normalization"] == "LayerNorm":
        fields.require("position_embedding_type", ("learned_absolute",))
        fields.require("add_bias_linear", (True,), True)
        for name in ("swiglu", "quick_geglu", "squared_relu"):
            fields.require(name, (None, False))
        fields.require("num_experts", (None, 0))
        fields.require("untie_embeddings_and_output_weights", (None, False))
        return "gpt2"
    fields.require("position_embedding_type", ("rope",))
    fields.require("swiglu", (True,))
    normed = bool(fields.get("qk_layernorm"))
    if fields.get("num_experts"):
        return "qwen3_moe" if normed else "mixtral"
    if normed:
        return "qwen3"
    return "qwen2" if fields.get("add_qkv_bias") and not fields.get("add_bias_linear") else "llama"


def _sizes(fields: RecordedFields) -> dict[str, Any]:
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    grouped = bool(fields.get("group_query_attention"))
    return {
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("num_query_groups") if grouped else heads,
        "head_dim": fields.size("kv_channels", hidden // heads),
        "intermediate_size": fields.size("ffn_hidden_size"),
        "max_position_embeddings": fields.size("max_position_embeddings"),
    }


def _rotary(fields: RecordedFields) -> dict[str, Any]:
    fields.require("rotary_percent", (None, 1))
    fields.require("use_rope_scaling", (None, False))
    fields.require("rotary_seq_len_interpolation_factor", (None,))
    base = fields.number("rotary_base", 10_000)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def _gelu(fields: RecordedFields) -> str:
    """Return the activation: Megatron's fused one is the tanh approximation."""
    exact = not fields.get("bias_gelu_fusion", True) and not fields.get("openai_gelu")
    return "gelu" if exact else "gelu_new"


def _experts(fields: RecordedFields, model_type: str) -> dict[str, Any]:
    if model_type not in ("mixtral", "qwen3_moe"):
        return {}
    for name, values in _PLAIN_EXPERTS.items():
        fields.require(name, values)
    balanced = fields.get("moe_router_load_balancing_type")
    if "sinkhorn" in (balanced if isinstance(balanced, list) else [balanced]):
        fields.require("moe_router_load_balancing_type", ())
    size = fields.size("moe_ffn_hidden_size", fields.size("ffn_hidden_size"))
    count = fields.size("num_experts")
    known = {"num_experts_per_tok": fields.size("moe_router_topk")}
    # Softmax after the choice is a softmax of all, normalised over the chosen.
    if model_type == "mixtral":
        fields.require("moe_router_pre_softmax", (None, False))
        return {**known, "num_local_experts": count, "intermediate_size": size}
    return {
        **known,
        "num_experts": count,
        "moe_intermediate_size": size,
        "norm_topk_prob": not fields.get("moe_router_pre_softmax"),
    }
