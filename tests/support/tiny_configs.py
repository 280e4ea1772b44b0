"""The smallest config of each model type: for tests of what surrounds a model."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from zero_tp.model.architectures import ARCHITECTURES

MODEL_TYPES = sorted(ARCHITECTURES)
CAUSAL_TYPES = [name for name in MODEL_TYPES if ARCHITECTURES[name].causal]
GPT2 = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64}
SIZES = {
    **{"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"intermediate_size": 32, "max_position_embeddings": 64, "moe_intermediate_size": 16},
    **{"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 16},
}


def tiny_fields(model_type: str, vocabulary: int) -> dict[str, Any]:
    """`zero_tp.model` of a model without dropout; its special tokens are those of no tokenizer in particular."""
    declared = AutoConfig.for_model(model_type).to_dict()
    wanted = GPT2 if model_type == "gpt2" else SIZES
    fields = {name: value for name, value in wanted.items() if name in declared}
    tokens = {name: 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id") if declared.get(name) is not None}
    dropouts = {name: 0.0 for name in declared if "dropout" in name or name.endswith("pdrop")}
    return {"model_type": model_type, **fields, **tokens, **dropouts, "vocab_size": vocabulary}


def tiny_config(model_type: str, vocabulary: int) -> PretrainedConfig:
    """The config of `tiny_fields`."""
    return AutoConfig.for_model(**tiny_fields(model_type, vocabulary))
