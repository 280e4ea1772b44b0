"""llama: Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures import llama_like
from zero_tp.models.spec import TransformerSpec

FIELDS = llama_like.fields(
    sizes=("head_dim",),
    read=("attention_bias", "mlp_bias"),
    irrelevant={"pretraining_tp": "transformers computes the same whatever it says"},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    bias = config.attention_bias
    return llama_like.spec(config, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


ARCHITECTURE = llama_like.architecture(FIELDS, spec, "LlamaForCausalLM")
