"""ministral is Hugging Face's MinistralForCausalLM: Mistral with windows in some layers."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    common.require_window(config)
    if config.head_dim is None:
        remedy = f"give {common.head_size_of(config)}"
        problem = "null, with which transformers fails"
        raise ConfigError(f"{MODEL_KEY}.head_dim", problem, remedy)
    return common.spec(config)


ARCHITECTURE = common.architecture(FIELDS, spec, "MinistralForCausalLM")
