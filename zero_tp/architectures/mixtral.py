"""mixtral is Hugging Face's MixtralForCausalLM: every MLP is a mixture of experts."""

from __future__ import annotations

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.architectures.table import Weight

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "sliding_window", "num_experts_per_tok", "num_local_experts"),
    read=("pad_token_id", "output_router_logits", "router_aux_loss_coef"),
    fixed={"router_jitter_noise": (0.0, "TP ranks would route noise that transformers does not draw")},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with the window in every layer.

    transformers adds the load-balancing loss only with `output_router_logits`.
    """
    return common.spec(
        config,
        mlp="experts",
        experts=common.experts(config, config.num_local_experts, config.intermediate_size, normalised=True),
        windows=(config.sliding_window,) * config.num_hidden_layers,
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    experts = common.expert_weights(spec, "block_sparse_moe", ("w1", "w3", "w2"))
    return (*common.weights(spec), *experts)


ARCHITECTURE = common.architecture(FIELDS, spec, "MixtralForCausalLM", weights)
