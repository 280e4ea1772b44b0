"""qwen3 is Hugging Face's Qwen3ForCausalLM, which norms each head of Q and K."""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window"),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=("pad_token_id", "attention_bias", "use_sliding_window", "max_window_layers"),
)
ARCHITECTURE = common.architecture(
    FIELDS, partial(common.spec, query_key_norm="heads"), "Qwen3ForCausalLM"
)
