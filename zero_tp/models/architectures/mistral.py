"""mistral: Hugging Face's MistralForCausalLM, whose layers all have the same sliding window."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures import llama_like
from zero_tp.models.spec import TransformerSpec

FIELDS = llama_like.fields(sizes=("head_dim", "sliding_window"))


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    return llama_like.spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)


ARCHITECTURE = llama_like.architecture(FIELDS, spec, "MistralForCausalLM")
