"""qwen3: Hugging Face's Qwen3ForCausalLM, which norms each head of Q and K."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.models.architectures import llama_like
from zero_tp.models.spec import TransformerSpec

FIELDS = llama_like.fields(
    sizes=("head_dim", "sliding_window"),
    read=("attention_bias", "use_sliding_window", "layer_types"),
    irrelevant={"max_window_layers": "layer_types, which is made from it, decides"},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """
    Raises:
        UserError: a field whose value is not computed.
    """
    bias, windows = config.attention_bias, llama_like.windows_by_layer(config)
    return llama_like.spec(config, qkv_bias=bias, output_bias=bias, query_key_norm=True, windows=windows)


ARCHITECTURE = llama_like.architecture(FIELDS, spec, "Qwen3ForCausalLM")
