"""llama is Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"),
    read=("pad_token_id", "attention_bias", "mlp_bias"),
    fixed={"rope_interleaved": (False, "the class rotates feature i with feature i + d/2")},
    irrelevant={
        "pretraining_tp": "transformers computes the same for every value",
        "is_llama_config": "a note by the file's author",
    },
)
ARCHITECTURE = common.architecture(FIELDS, common.spec, "LlamaForCausalLM")
