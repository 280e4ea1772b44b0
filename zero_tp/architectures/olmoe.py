"""olmoe is Hugging Face's OlmoeForCausalLM: experts in every layer, and a norm of all heads' Q and K together."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec

FIELDS = common.fields(
    sizes=("num_key_value_heads", "num_experts", "num_experts_per_tok"),
    positive=("clip_qkv",),
    read=("pad_token_id", "attention_bias", "output_router_logits", "router_aux_loss_coef", "norm_topk_prob"),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with the norms and the limit of Q and K."""
    return common.spec(config, mlp="experts", query_key_norm="whole", clip=config.clip_qkv)


ARCHITECTURE = common.architecture(FIELDS, spec, "OlmoeForCausalLM")
