"""cohere2 is Hugging Face's Cohere2ForCausalLM: attention and MLP read one norm; only layers with a
window rotate.
"""

from __future__ import annotations

from functools import partial

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.rotary import rotary
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    epsilon="layer_norm_eps",
    positive=("logit_scale",),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    common.require_window(config)
    shared = rotary(
        config, common.head_size_of(config), neighbours=True, arithmetic="rounded_tables"
    )
    return common.spec(
        config,
        norm="biasless_layer_norm",
        norm_epsilon=config.layer_norm_eps,
        layer="shared_norm",
        rotaries=tuple(shared if kind == common.SLIDING else None for kind in config.layer_types),
        logit_scale=config.logit_scale,
    )


WEIGHTS = partial(llama_names.weights, norms={"attention_norm": "input_layernorm"})
ARCHITECTURE = common.architecture(FIELDS, spec, "Cohere2ForCausalLM", WEIGHTS)
