"""olmo3 is Hugging Face's Olmo3ForCausalLM: OLMo 2 with sliding windows, and rotary parameters for
each type of layer.
"""

from __future__ import annotations

from zero_tp.model.architectures import common, olmo2

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias"),
    undeclared={"head_dim": int},
)
ARCHITECTURE = common.architecture(FIELDS, olmo2.spec, "Olmo3ForCausalLM", olmo2.WEIGHTS)
