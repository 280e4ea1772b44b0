"""qwen3 is Hugging Face's Qwen3ForCausalLM, which norms each head of Q and K."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias", "use_sliding_window", "max_window_layers"),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with each layer's window and the norms of Q and K."""
    bias, windows = config.attention_bias, common.windows_by_layer(config)
    return common.spec(config, attention_bias=bias, query_key_norm="heads", windows=windows)


ARCHITECTURE = common.architecture(FIELDS, spec, "Qwen3ForCausalLM")
