"""mistral is Hugging Face's MistralForCausalLM, whose layers all have the same sliding window."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec

FIELDS = common.fields(sizes=("num_key_value_heads", "head_dim", "sliding_window"))


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with the window in every layer."""
    return common.spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)


ARCHITECTURE = common.architecture(FIELDS, spec, "MistralForCausalLM")
