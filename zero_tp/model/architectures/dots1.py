"""dots1 is Hugging Face's Dots1ForCausalLM: DeepSeek-V3's experts, and a norm of each head's Q and
K.
"""

from __future__ import annotations

from functools import partial

from zero_tp.model.architectures import common, grouped_experts

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", *grouped_experts.SIZES),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=(
        "pad_token_id",
        "attention_bias",
        "sliding_window",
        "max_window_layers",
        "first_k_dense_replace",
        *grouped_experts.READ,
    ),
    irrelevant=grouped_experts.IRRELEVANT,
    undeclared={"head_dim": int},
)
ARCHITECTURE = common.architecture(
    FIELDS,
    partial(grouped_experts.spec, query_key_norm="heads"),
    "Dots1ForCausalLM",
    grouped_experts.WEIGHTS,
)
