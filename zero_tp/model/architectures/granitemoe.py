"""granitemoe is Hugging Face's GraniteMoeForCausalLM: Granite with experts, which files stack."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common, granite, llama_names
from zero_tp.model.architectures.llama_names import HF_LAYER, OUR_LAYER
from zero_tp.model.architectures.spec import ExpertsSpec, TransformerSpec
from zero_tp.model.architectures.table import Weight

READ = ("pad_token_id", "attention_bias", "output_router_logits", "router_aux_loss_coef")
FIELDS = common.fields(
    sizes=("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok"),
    positive=granite.MULTIPLIERS,
    read=READ,
    undeclared={"head_dim": int},
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Granite's spec with experts in every layer, and the config's shared expert."""
    names = [*granite.MULTIPLIERS, "num_local_experts", "num_experts_per_tok"]
    if config.output_router_logits:
        names.append("router_aux_loss_coef")
    for name in names:
        if getattr(config, name) is None:
            problem = "null, with which transformers fails"
            raise ConfigError(f"{MODEL_KEY}.{name}", problem, "give a number")
    mlps = ("experts",) * config.num_hidden_layers
    return granite.spec(config, mlps=mlps, experts=_experts(config))


def _experts(config: PretrainedConfig) -> ExpertsSpec:
    count = config.num_local_experts
    per_token = config.num_experts_per_tok
    shared = getattr(config, "shared_intermediate_size", 0)
    common.check_experts_per_token("num_experts_per_tok", per_token, count)
    if shared < 0:
        key = f"{MODEL_KEY}.shared_intermediate_size"
        raise ConfigError(key, f"{shared} is no width", "give 0 or more")
    return ExpertsSpec(
        count,
        per_token,
        size=config.intermediate_size,
        normalised=True,
        loss_weight=config.router_aux_loss_coef if config.output_router_logits else None,
        shared=shared,
        shared_gate=False,
        router="top_k_softmax",
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    without_mlps = llama_names.weights(replace(spec, experts=None), mlp={})
    return (*without_mlps, *_expert_weights(spec))


def _expert_weights(spec: TransformerSpec) -> Iterator[Weight]:
    # Files and our parameters have the same tensors, [E, out, in]; the class has other names.
    for our_name, in_files, in_class in (
        ("router", "router.layer.weight", "router.weight"),
        ("gate_up", "input_linear.weight", "experts.gate_up_proj"),
        ("down", "output_linear.weight", "experts.down_proj"),
    ):
        block = f"{HF_LAYER}block_sparse_moe"
        yield Weight(
            f"{OUR_LAYER}mlp.{our_name}.weight",
            f"{block}.{in_files}",
            native_name=f"{block}.{in_class}",
        )
    if spec.experts is not None and spec.experts.shared:
        for our_name, hf_name in (("gate_up", "input_linear"), ("down", "output_linear")):
            names = (f"mlp.shared.{our_name}", f"shared_mlp.{hf_name}")
            yield from llama_names.layer_weights(*names, bias=False)


ARCHITECTURE = common.architecture(FIELDS, spec, "GraniteMoeForCausalLM", weights)
