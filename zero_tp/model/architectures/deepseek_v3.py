"""deepseek_v3 is Hugging Face's DeepseekV3ForCausalLM (DeepSeek-V3 and R1): latent attention, and
experts in groups.
"""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, grouped_experts, latent_attention
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight

FIELDS = common.fields(
    sizes=(*latent_attention.SIZES, *grouped_experts.SIZES),
    read=("head_dim", "first_k_dense_replace", *latent_attention.READ, *grouped_experts.READ),
    irrelevant={
        **latent_attention.IRRELEVANT,
        **grouped_experts.IRRELEVANT,
        **grouped_experts.SECOND_TOKEN,
    },
    undeclared={"head_dim": int},
    quantizations=("fp8",),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec of a config with latent attention and experts in groups."""
    return grouped_experts.spec(config, **latent_attention.settings(config))


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return the weights of such a spec."""
    return grouped_experts.WEIGHTS(spec, latent_attention.weights(spec))


ARCHITECTURE = common.architecture(
    FIELDS,
    spec,
    "DeepseekV3ForCausalLM",
    weights,
    # By transformers' own name of that layer.
    untrained_parts=common.multi_token(r"(model\.)?layers\.61\..*"),
)
