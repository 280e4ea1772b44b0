"""The Hugging Face config of a model that Megatron-LM's args describe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from zero_tp.base.errors import UserError, first_line, shown

ABSENT = object()


def config_of(args: Mapping[str, Any], vocabulary: int | None, folder: Path) -> PretrainedConfig:
    """Return the config of a model, from the args of its training.

    Args:
        vocabulary: of the tokenizer; by default that of the args, which may be padded.

    Raises:
        UserError: a size is missing, or no family that is derived here has such layers.
    """
    fields = _Args(args, folder)
    model_type = _family(fields)
    tokens = vocabulary or args.get("vocab_size") or fields["padded_vocab_size"]
    untied = bool(args.get("untie_embeddings_and_output_weights", False))
    sizes = _sizes(fields)
    if model_type == "gpt2":
        known = {
            "n_embd": sizes["hidden_size"],
            "n_layer": sizes["num_hidden_layers"],
            "n_head": sizes["num_attention_heads"],
            "n_inner": sizes["intermediate_size"],
            "n_positions": sizes["max_position_embeddings"],
            "layer_norm_epsilon": args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5)),
            "activation_function": _gelu(args),
        }
    else:
        known = {**sizes, **_rotary(fields), **_experts(fields, model_type)}
        known["rms_norm_eps"] = args.get("norm_epsilon", args.get("layernorm_epsilon", 1e-5))
        if model_type == "llama":
            bias = bool(args.get("add_bias_linear"))
            known |= {"attention_bias": bias, "mlp_bias": bias}
    # Ids of special tokens belong to a tokenizer, not to the args.
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    try:
        return AutoConfig.for_model(
            model_type, vocab_size=tokens, tie_word_embeddings=not untied, **known, **ids
        )
    except Exception as error:  # transformers raises types of its own here
        reason = first_line(error.__cause__ or error)
        raise UserError(f"{folder}: transformers has no such {model_type}: {reason}") from error


class _Args:
    """Args of which a missing one is an error that names it."""

    def __init__(self, args: Mapping[str, Any], folder: Path) -> None:
        self.args = args
        self.folder = folder

    def __getitem__(self, name: str) -> Any:
        if self.args.get(name) is None:
            raise UserError(
                f"{self.folder}: its args have no {name}; give a config.json of the model with "
                "--config"
            )
        return self.args[name]

    def refuse(self, name: str, family: str) -> UserError:
        value = shown(self.args.get(name))
        return UserError(
            f"{self.folder}: {name} {value} with {family}: no family is derived from it; give a "
            "config.json of the model with --config"
        )


def _family(fields: _Args) -> str:
    """Return the model_type whose class computes what the args describe."""
    args = fields.args
    if not args:
        raise UserError(
            f"{fields.folder}: has no args of its training; give a config.json of the model with "
            "--config"
        )
    for name in ("multi_latent_attention", "apply_layernorm_1p", "hybrid_override_pattern"):
        if args.get(name):
            raise fields.refuse(name, "GPTModel")
    normalization = fields["normalization"]
    position = fields["position_embedding_type"]
    if normalization == "LayerNorm":
        if position != "learned_absolute" or args.get("swiglu") or args.get("num_experts"):
            raise fields.refuse("position_embedding_type", "LayerNorm")
        if not args.get("add_bias_linear", True) or args.get("squared_relu"):
            raise fields.refuse("add_bias_linear", "LayerNorm")
        if args.get("untie_embeddings_and_output_weights"):
            raise fields.refuse("untie_embeddings_and_output_weights", "learned positions")
        return "gpt2"
    if normalization != "RMSNorm" or position != "rope":
        raise fields.refuse("position_embedding_type", str(normalization))
    if not args.get("swiglu"):
        raise fields.refuse("swiglu", "RMSNorm")
    normed = bool(args.get("qk_layernorm"))
    if args.get("num_experts"):
        return "qwen3_moe" if normed else "mixtral"
    if normed:
        return "qwen3"
    return "qwen2" if args.get("add_qkv_bias") and not args.get("add_bias_linear") else "llama"


def _sizes(fields: _Args) -> dict[str, Any]:
    heads = fields["num_attention_heads"]
    groups = heads
    if fields.args.get("group_query_attention"):
        groups = fields["num_query_groups"]
    return {
        "hidden_size": fields["hidden_size"],
        "num_hidden_layers": fields["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": fields.args.get("kv_channels") or fields["hidden_size"] // heads,
        "intermediate_size": fields["ffn_hidden_size"],
        "max_position_embeddings": fields["max_position_embeddings"],
    }


def _rotary(fields: _Args) -> dict[str, Any]:
    args = fields.args
    if args.get("rotary_percent", 1.0) != 1.0:
        raise fields.refuse("rotary_percent", "RMSNorm")
    if args.get("use_rope_scaling") or args.get("rotary_seq_len_interpolation_factor"):
        raise fields.refuse("use_rope_scaling", "RMSNorm")
    base = float(args.get("rotary_base") or 10_000)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def _gelu(args: Mapping[str, Any]) -> str:
    """Return the activation: Megatron's fused one is the tanh approximation."""
    exact = not args.get("bias_gelu_fusion", True) and not args.get("openai_gelu")
    return "gelu" if exact else "gelu_new"


def _experts(fields: _Args, model_type: str) -> dict[str, Any]:
    args = fields.args
    if model_type not in ("mixtral", "qwen3_moe"):
        return {}
    if args.get("moe_router_score_function", "softmax") != "softmax":
        raise fields.refuse("moe_router_score_function", model_type)
    if args.get("moe_shared_expert_intermediate_size"):
        raise fields.refuse("moe_shared_expert_intermediate_size", model_type)
    if args.get("moe_layer_freq", 1) != 1:
        raise fields.refuse("moe_layer_freq", model_type)
    size = args.get("moe_ffn_hidden_size") or fields["ffn_hidden_size"]
    chosen = {"num_experts_per_tok": fields["moe_router_topk"]}
    # Softmax after the choice is a softmax of all, normalised over the chosen.
    normalised = not args.get("moe_router_pre_softmax")
    if model_type == "mixtral":
        if not normalised:
            raise fields.refuse("moe_router_pre_softmax", model_type)
        return {**chosen, "num_local_experts": fields["num_experts"], "intermediate_size": size}
    return {
        **chosen,
        "num_experts": fields["num_experts"],
        "moe_intermediate_size": size,
        "norm_topk_prob": normalised,
    }
