"""olmo3 is Hugging Face's Olmo3ForCausalLM: OLMo 2 with sliding windows, and rotary parameters for
each type of layer.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, olmo2
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return OLMo 2's spec with this architecture's differences."""
    common.require_window(config)
    return olmo2.spec(config, by_type=True)


ARCHITECTURE = common.architecture(FIELDS, spec, "Olmo3ForCausalLM", olmo2.WEIGHTS)
