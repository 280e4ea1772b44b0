"""glm4_moe is Hugging Face's Glm4MoeForCausalLM (GLM-4.5): DeepSeek-V3's experts, and half of each
head rotates.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, grouped_experts
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", *grouped_experts.SIZES),
    read=(
        "pad_token_id",
        "attention_bias",
        "use_qk_norm",
        "first_k_dense_replace",
        *grouped_experts.READ,
    ),
    irrelevant={**grouped_experts.IRRELEVANT, **grouped_experts.SECOND_TOKEN},
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec of a config. The output projection has no bias."""
    return grouped_experts.spec(
        config,
        partial_rotary=True,
        query_key_norm="heads" if config.use_qk_norm else "none",
        qkv_bias=config.attention_bias,
        output_bias=False,
    )


ARCHITECTURE = common.architecture(
    FIELDS,
    spec,
    "Glm4MoeForCausalLM",
    grouped_experts.WEIGHTS,
    # By transformers' own name of that layer.
    untrained_parts=common.multi_token(r"(model\.)?layers\.(46|92)\..*"),
)
