"""qwen2_moe is Hugging Face's Qwen2MoeForCausalLM: one expert of each layer computes every token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PretrainedConfig

from zero_tp.architectures import common
from zero_tp.architectures.spec import TransformerSpec
from zero_tp.architectures.table import Weight
from zero_tp.constants import MODEL_KEY
from zero_tp.errors import ConfigError

SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
READ = ("pad_token_id", "output_router_logits", "router_aux_loss_coef", "norm_topk_prob", "mlp_only_layers")

FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "shared_expert_intermediate_size", *SIZES),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    read=(*READ, "qkv_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return the spec, with each layer's window and MLP.

    Raises:
        ConfigError: a window that is not positive; see `common`.
    """
    window, shared = config.sliding_window, config.shared_expert_intermediate_size
    if config.use_sliding_window and (window is None or window < 1):  # the class makes it 0 where there is none
        raise ConfigError(f"{MODEL_KEY}.sliding_window", f"{window} is not positive", "give 1 or more")
    count, size, normalised = config.num_experts, config.moe_intermediate_size, config.norm_topk_prob
    return common.spec(
        config,
        mlp=common.sparse_mlps(config),
        experts=common.experts(config, count, size, normalised=normalised, shared=shared),
        qkv_bias=config.qkv_bias,
        windows=common.windows_by_layer(config),
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    return (*common.weights(spec), *common.expert_weights(spec), *shared_weights(spec))


def shared_weights(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield the weights of the experts that compute every token."""
    for ours, theirs in common.GATED.items():
        linear = common.layer_weights(f"mlp.shared.{ours}", *(f"mlp.shared_expert.{t}" for t in theirs), bias=False)
        yield from (replace(weight, layers=spec.expert_layers) for weight in linear)
    gate = Weight(f"{common.OURS}mlp.shared.gate", f"{common.THEIRS}mlp.shared_expert_gate.weight")
    yield replace(gate, layers=spec.expert_layers)


ARCHITECTURE = common.architecture(FIELDS, spec, "Qwen2MoeForCausalLM", weights)
