"""llama is Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    read=("pad_token_id", "attention_bias", "mlp_bias"),
    fixed={"rope_interleaved": (False, "features turn with those half a head away, as the class does")},
    irrelevant={
        "pretraining_tp": "transformers computes the same whatever it says",
        "is_llama_config": "a note of who wrote the file",
    },
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with biases where the config has them."""
    return common.spec(config, attention_bias=config.attention_bias, mlp_bias=config.mlp_bias)


ARCHITECTURE = common.architecture(FIELDS, spec, "LlamaForCausalLM")
