"""mistral is Hugging Face's MistralForCausalLM, whose layers all have the same sliding window."""

from __future__ import annotations

from zero_tp.model.architectures import common

FIELDS = common.fields(sizes=("num_key_value_heads", "head_dim", "sliding_window"))
ARCHITECTURE = common.architecture(FIELDS, common.spec, "MistralForCausalLM")
