"""smollm3 is Hugging Face's SmolLM3ForCausalLM: some layers do not rotate, or have a window."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window", "no_rope_layer_interval"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias", "mlp_bias", "use_sliding_window", "no_rope_layers"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    layers = config.num_hidden_layers
    rotates = list(config.no_rope_layers)
    if len(rotates) < layers:
        problem = f"{len(rotates)} entries for {layers} layers"
        raise ConfigError(f"{MODEL_KEY}.no_rope_layers", problem, "give one for each")
    # 1 in no_rope_layers stands for a layer that rotates.
    return common.spec(config, rotates=[bool(number) for number in rotates[:layers]])


ARCHITECTURE = common.architecture(FIELDS, spec, "SmolLM3ForCausalLM")
