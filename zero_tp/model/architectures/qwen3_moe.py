"""qwen3_moe is Hugging Face's Qwen3MoeForCausalLM: Qwen3's attention, and experts."""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common, qwen2_moe

FIELDS = common.fields(
    sizes=(
        "num_key_value_heads",
        "head_dim",
        "sliding_window",
        "num_local_experts",
        *qwen2_moe.SIZES,
    ),
    read=(*qwen2_moe.READ, "attention_bias", "use_sliding_window"),
    irrelevant={"max_window_layers": "all layers have the same window"},
    undeclared={"head_dim": int, "num_local_experts": int},  # the class's own name of num_experts
)
ARCHITECTURE = common.architecture(
    FIELDS, partial(common.spec, query_key_norm="heads"), "Qwen3MoeForCausalLM"
)
