"""qwen3_5_moe_text is Hugging Face's Qwen3_5MoeForCausalLM: Qwen3.5 with experts in every layer."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, qwen3_5_text, qwen3_next
from zero_tp.model.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=(
        *qwen3_next.SIZES,
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    choices=qwen3_next.CHOICES,
    read=("pad_token_id", "attention_bias", "output_router_logits", "router_aux_loss_coef"),
    irrelevant=qwen3_next.IRRELEVANT,
    undeclared=qwen3_next.UNDECLARED,
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Qwen3.5's spec with experts."""
    return qwen3_5_text.spec(config, mlp="experts", mlp_size=config.moe_intermediate_size)


ARCHITECTURE = common.architecture(
    FIELDS,
    spec,
    "Qwen3_5MoeForCausalLM",
    qwen3_5_text.weights,
    **qwen3_5_text.FILES,
)
