"""glm4_moe_lite is Hugging Face's Glm4MoeLiteForCausalLM (GLM-4.7-Flash): DeepSeek-V3, with a list
of the layers that have experts.
"""

from __future__ import annotations

from zero_tp.model.architectures import common, deepseek_v3, grouped_experts, latent_attention

FIELDS = common.fields(
    sizes=(*latent_attention.SIZES, *grouped_experts.SIZES),
    choices={"mlp_layer_types": (grouped_experts.DENSE, grouped_experts.SPARSE)},
    read=(*latent_attention.READ, *grouped_experts.READ),
    irrelevant={
        **latent_attention.IRRELEVANT,
        **grouped_experts.IRRELEVANT,
        **grouped_experts.SECOND_TOKEN,
    },
)
ARCHITECTURE = common.architecture(
    FIELDS,
    deepseek_v3.spec,
    "Glm4MoeLiteForCausalLM",
    deepseek_v3.weights,
    # By transformers' own name of that layer.
    untrained_parts=common.multi_token(r"(model\.)?layers\.47\..*"),
)
