"""qwen2: Hugging Face's Qwen2ForCausalLM, with biases on Q, K and V, and sliding windows in some layers if wanted."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures import llama_like
from zero_tp.models.spec import TransformerSpec

FIELDS = llama_like.fields(
    sizes=("sliding_window",),
    read=("use_sliding_window", "layer_types"),
    irrelevant={"max_window_layers": "layer_types, which is made from it, decides"},
    undeclared={"head_dim": int | None},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    return llama_like.spec(config, qkv_bias=True, windows=llama_like.windows_by_layer(config))


ARCHITECTURE = llama_like.architecture(FIELDS, spec, "Qwen2ForCausalLM")
