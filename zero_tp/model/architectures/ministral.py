"""ministral is Hugging Face's MinistralForCausalLM: Mistral with windows in some layers."""

from __future__ import annotations

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
)
ARCHITECTURE = common.architecture(FIELDS, common.spec, "MinistralForCausalLM")
