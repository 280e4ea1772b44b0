"""glm4 is Hugging Face's Glm4ForCausalLM: norms before and after each branch; neighbours of a part
of each head rotate.
"""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim"), read=("pad_token_id", "attention_bias")
)
NORM_NAMES = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        layer="sandwich",
        output_bias=False,
        rotaries=rotaries(
            config, common.head_size_of(config), partial_rotary=True, neighbours=True
        ),
    )


WEIGHTS = partial(
    llama_names.weights,
    mlp={"gate_up": ("gate_up_proj",), "down": ("down_proj",)},
    norms=NORM_NAMES,
)
ARCHITECTURE = common.architecture(FIELDS, spec, "Glm4ForCausalLM", WEIGHTS)
