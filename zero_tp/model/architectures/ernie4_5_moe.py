"""ernie4_5_moe is Hugging Face's Ernie4_5_MoeForCausalLM: the probabilities of experts have a bias
for the choice, and neighbours rotate in fp32.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError, shown
from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import Dropouts, ExpertsSpec, TransformerSpec

FIELDS = replace(
    common.fields(
        sizes=(
            "num_key_value_heads",
            "head_dim",
            "moe_intermediate_size",
            "moe_num_experts",
            "moe_k",
            "moe_layer_interval",
        ),
        positive=("moe_norm_min",),
        read=(
            "pad_token_id",
            "moe_num_shared_experts",
            "moe_layer_start_index",
            "moe_layer_end_index",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
        undeclared={"head_dim": int},
    ),
    dropouts=(),  # the class has none
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    return common.spec(
        config,
        mlps=_mlps(config),
        experts=_experts(config),
        dropouts=Dropouts(),
        rotaries=rotaries(config, common.head_size_of(config), neighbours=True, arithmetic="fp32"),
    )


def _mlps(config: PretrainedConfig) -> tuple[str, ...]:
    """Return each layer's MLP; with interval 2, layers 1, 3, 5 … between start and end have
    experts.
    """
    first = _number(config, "moe_layer_start_index")
    last = _number(config, "moe_layer_end_index")
    interval = _number(config, "moe_layer_interval")
    mlps = tuple(
        "experts" if (number + 1) % interval == 0 and first <= number <= last else "gated"
        for number in range(config.num_hidden_layers)
    )
    if "experts" not in mlps:
        key = f"{MODEL_KEY}.moe_layer_start_index"
        raise ConfigError(key, "no layer has experts", "take the model_type without experts")
    return mlps


def _experts(config: PretrainedConfig) -> ExpertsSpec:
    count = _number(config, "moe_num_experts")
    per_token = _number(config, "moe_k")
    shared = _number(config, "moe_num_shared_experts")
    common.check_experts_per_token("moe_k", per_token, count)
    if shared < 0:
        key = f"{MODEL_KEY}.moe_num_shared_experts"
        raise ConfigError(key, f"{shared} is not a number of experts", "give 0 or more")
    smallest_sum = config.moe_norm_min
    if smallest_sum is None:
        problem = "null, with which transformers fails"
        raise ConfigError(f"{MODEL_KEY}.moe_norm_min", problem, "leave it out for the default")
    return ExpertsSpec(
        count,
        per_token,
        size=config.moe_intermediate_size,
        normalised=True,
        loss_weight=config.router_aux_loss_coef if config.output_router_logits else None,
        shared=shared * config.moe_intermediate_size,
        shared_gate=False,
        router="biased_softmax",
        smallest_sum=smallest_sum,
    )


def _number(config: PretrainedConfig, name: str) -> int:
    value = getattr(config, name)
    if not isinstance(value, int):
        problem = f"{shown(value)}, with which transformers fails"
        raise ConfigError(f"{MODEL_KEY}.{name}", problem, "give a number")
    return value


WEIGHTS = partial(
    llama_names.weights,
    shared="shared_experts",
    correction_bias="moe_statics.e_score_correction_bias",
    native_correction_bias="gate.moe_statics.e_score_correction_bias",
)
ARCHITECTURE = common.architecture(
    FIELDS,
    spec,
    "Ernie4_5_MoeForCausalLM",
    WEIGHTS,
    # Layers that predict a second token, which transformers drops.
    untrained_parts=common.multi_token(r".*mtp.*"),
)
