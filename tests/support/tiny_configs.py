"""The smallest config of each model type: for tests of what surrounds a model."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from zero_tp.model.architectures import ARCHITECTURES
from zero_tp.model.architectures.common import FULL, SLIDING
from zero_tp.model.architectures.fields import FIXED_IN_EVERY_CONFIG, IRRELEVANT_IN_EVERY_CONFIG
from zero_tp.model.architectures.qwen3_next import LINEAR

MODEL_TYPES = sorted(ARCHITECTURES)
CAUSAL_TYPES = [name for name in MODEL_TYPES if ARCHITECTURES[name].causal]
GPT2 = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}
SIZES = {
    **{
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    },
    **{"intermediate_size": 32, "max_position_embeddings": 64, "moe_intermediate_size": 16},
    "head_dim": 8,  # what follows from the others, where a class has another default
    **{
        "num_experts": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_expert_intermediate_size": 16,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_num_experts": 2,
        "moe_k": 1,
        "moe_layer_start_index": 0,
    },
    **{
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def tiny_fields(model_type: str, vocabulary: int) -> dict[str, Any]:
    """`zero_tp.model` of a model without dropout; its special tokens are those of no tokenizer
    in particular.
    """
    declared = AutoConfig.for_model(model_type).to_dict()
    wanted = GPT2 if model_type == "gpt2" else SIZES
    fields: dict[str, Any] = {name: value for name, value in wanted.items() if name in declared}
    if "linear_conv_kernel_dim" in declared:
        fields |= {"num_hidden_layers": 2, "layer_types": [LINEAR, FULL]}
    tokens = {
        name: 0
        for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        if declared.get(name) is not None
    }
    dropouts = {name: 0.0 for name in declared if "dropout" in name or name.endswith("pdrop")}
    return {"model_type": model_type, **fields, **tokens, **dropouts, "vocab_size": vocabulary}


def tiny_config(model_type: str, vocabulary: int) -> PretrainedConfig:
    """The config of `tiny_fields`."""
    return AutoConfig.for_model(**tiny_fields(model_type, vocabulary))


GENERAL_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 20,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 16,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "mlp_only_layers": [0],
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_num_experts": 5,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "moe_norm_min": 0.9,
    "clip_qkv": 2.0,
    "swiglu_limit": 0.4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "max_position_embeddings": 32,
    "use_sliding_window": True,
    "sliding_window": 5,
    "type_vocab_size": 3,
    "max_window_layers": 1,
    "rotary_pct": 0.7,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 3,
}


def general_fields(model_type: str) -> dict[str, Any]:
    """A small config of any model_type, from the general names that may be written for it."""
    fields, aliases = ARCHITECTURES[model_type].fields, CONFIG_MAPPING[model_type].attribute_map
    declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    known = (declared | fields.undeclared.keys()) & set(fields.names())
    types: dict[str, Any] = {}
    if "layer_types" in known:
        types = {"layer_types": [SLIDING, FULL, SLIDING]}
    if "linear_conv_kernel_dim" in known:
        # See `_linear_attention_fields` of decoders.py.
        types = {"layer_types": [LINEAR, FULL, LINEAR], "rms_norm_eps": 0.1}
        if CONFIG_MAPPING[model_type]().rope_parameters.get("partial_rotary_factor") is not None:
            types["partial_rotary_factor"] = 0.5  # of 0.25 one pair turns, by any rope_theta
    if "max_window_layers" in known:  # it decides
        types = {}
    sizes = dict(GENERAL_SIZES)
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
        del sizes["head_dim"]  # the features that rotate
    return {
        "model_type": model_type,
        **dict.fromkeys(fields.dropouts, 0.0),
        **types,
        **{
            aliases.get(name, name): value
            for name, value in sizes.items()
            if aliases.get(name, name) in known
        },
    }


def fields_of(model_type: str) -> list[str]:
    """All that the config class has, that its file may have, and that the tables know."""
    declared = [field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])]
    known = (
        *ARCHITECTURES[model_type].fields.names(),
        *IRRELEVANT_IN_EVERY_CONFIG,
        *FIXED_IN_EVERY_CONFIG,
    )
    return list(dict.fromkeys((*declared, *known)))
