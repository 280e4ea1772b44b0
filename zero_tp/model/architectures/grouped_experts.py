"""The experts of DeepSeek-V3's relatives, glm4_moe and dots1: sigmoid scores, groups, a bias for
the choice, shared experts without a gate, and dense layers before all others.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.spec import ExpertsSpec, TransformerSpec

SIZES = (
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_group",
    "topk_group",
)
DENSE, SPARSE = "dense", "sparse"
"""Values of `mlp_layer_types`."""
READ = ("norm_topk_prob", "routed_scaling_factor")
IRRELEVANT = {"output_router_logits": "the class has no load-balancing loss"}
SECOND_TOKEN = dict.fromkeys(
    ("num_mtp_layers", "num_nextn_predict_layers"),
    "the class has no layers that predict a second token",
)
"""Fields without effect, of layers that published files may have."""

WEIGHTS = partial(
    llama_names.weights, shared="shared_experts", correction_bias="gate.e_score_correction_bias"
)


def spec(config: PretrainedConfig, **overrides: Any) -> TransformerSpec:
    """Return the spec of a config; arguments as for `common.spec`."""
    return common.spec(config, mlps=_mlps(config), experts=_experts(config), **overrides)


def _mlps(config: PretrainedConfig) -> tuple[str, ...]:
    layers = config.num_hidden_layers
    if hasattr(config, "mlp_layer_types"):
        return _mlps_by_layer(config.mlp_layer_types, layers)
    dense = config.first_k_dense_replace
    key = f"{MODEL_KEY}.first_k_dense_replace"
    if not isinstance(dense, int) or dense < 0:
        raise ConfigError(key, f"{dense} is not a number of layers", "give 0 or more")
    if dense >= layers:
        raise ConfigError(key, "no layer has experts", f"give less than {layers}")
    return ("gated",) * dense + ("experts",) * (layers - dense)


def _mlps_by_layer(types: list[str], layers: int) -> tuple[str, ...]:
    key = f"{MODEL_KEY}.mlp_layer_types"
    if len(types) != layers:
        raise ConfigError(key, f"{len(types)} entries for {layers} layers", "give one for each")
    if SPARSE not in types:
        raise ConfigError(key, "no layer has experts", f'give a layer "{SPARSE}"')
    return tuple("experts" if kind == SPARSE else "gated" for kind in types)


def _experts(config: PretrainedConfig) -> ExpertsSpec:
    for name in SIZES:
        if getattr(config, name) is None:
            problem = "null, with which transformers fails"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, "give a number")
    count = config.n_routed_experts
    groups = config.n_group
    groups_per_token = config.topk_group
    per_token = config.num_experts_per_tok
    if count % groups or count // groups < 2:
        problem = f"{count} experts ≠ {groups} groups × {count / groups:.4g}"
        remedy = "give a divisor of n_routed_experts that leaves each group 2 experts or more"
        raise ConfigError(f"{MODEL_KEY}.n_group", problem, remedy)
    if groups_per_token > groups:
        problem = f"{groups_per_token} groups a token, of {groups} in a layer"
        raise ConfigError(f"{MODEL_KEY}.topk_group", problem, f"give at most {groups}")
    eligible = groups_per_token * (count // groups)
    if per_token > eligible:
        problem = f"{per_token} experts a token, of {eligible} in its groups"
        key = f"{MODEL_KEY}.num_experts_per_tok"
        raise ConfigError(key, problem, f"give at most {eligible}")
    return ExpertsSpec(
        count,
        per_token,
        size=config.moe_intermediate_size,
        normalised=bool(config.norm_topk_prob),
        loss_weight=None,
        shared=config.n_shared_experts * config.moe_intermediate_size,
        shared_gate=False,
        router="sigmoid",
        groups=groups,
        groups_per_token=groups_per_token,
        scale=float(config.routed_scaling_factor),
    )
