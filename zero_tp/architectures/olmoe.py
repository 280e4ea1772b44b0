"""olmoe is Hugging Face's OlmoeForCausalLM: experts in every layer, and a norm of all heads' Q and K together."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.architectures.table import Weight
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError

FIELDS = common.fields(
    sizes=("num_key_value_heads", "num_experts", "num_experts_per_tok"),
    read=(
        *("pad_token_id", "attention_bias", "clip_qkv"),
        *("output_router_logits", "router_aux_loss_coef", "norm_topk_prob"),
    ),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with the norms and the limit of Q and K.

    Raises:
        ConfigError: a limit that is not positive; see `common`.
    """
    bias, clip, normalised = config.attention_bias, config.clip_qkv, config.norm_topk_prob
    if clip is not None and clip <= 0:
        raise ConfigError(f"{MODEL_KEY}.clip_qkv", f"{clip} is not positive", "give more than 0, or null")
    return common.spec(
        config,
        mlp="experts",
        experts=common.experts(config, config.num_experts, config.intermediate_size, normalised=normalised),
        qkv_bias=bias,
        output_bias=bias,
        query_key_norm="whole",
        clip=clip,
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    return (*common.weights(spec), *common.expert_weights(spec))


ARCHITECTURE = common.architecture(FIELDS, spec, "OlmoeForCausalLM", weights)
