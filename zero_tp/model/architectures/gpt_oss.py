"""gpt_oss is Hugging Face's GptOssForCausalLM: sinks of the attention, and experts with biases and
a clamped SwiGLU, whose gate and up files interleave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers import PretrainedConfig

from zero_tp.model.architectures import common, llama_names
from zero_tp.model.architectures.llama_names import HF_LAYER, OUR_LAYER
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Form, Weight

FIELDS = replace(
    common.fields(
        sizes=(
            "num_key_value_heads",
            "head_dim",
            "sliding_window",
            "num_local_experts",
            "num_experts_per_tok",
        ),
        positive=("swiglu_alpha", "swiglu_limit"),
        read=("pad_token_id", "attention_bias", "output_router_logits", "router_aux_loss_coef"),
        irrelevant={"hidden_act": "the experts have a clamped SwiGLU for any value"},
    ),
    choices={"layer_types": (common.FULL, common.SLIDING)},
    quantizations=("mxfp4",),
)


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    common.require_window(config)
    experts = replace(
        common.experts(config),
        router="biased_top_k",
        bias=True,
        swiglu=(config.swiglu_alpha, config.swiglu_limit),
    )
    return common.spec(
        config,
        norm="wide_rms_norm",
        mlps=("experts",) * config.num_hidden_layers,
        experts=experts,
        activation=common.ACTIVATIONS["silu"],
        sinks=True,
    )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    without_mlps = llama_names.weights(replace(spec, experts=None), mlp={})
    return (*without_mlps, *_own_weights())


def _own_weights() -> Iterator[Weight]:
    yield Weight(f"{OUR_LAYER}attention.sinks", f"{HF_LAYER}self_attn.sinks")
    yield from llama_names.layer_weights("mlp.router", "mlp.router", bias=True)
    # Files stack experts as the class does, [E, in, out]; our parameters are [E, out, in].
    forms: tuple[tuple[str, str, Form], ...] = (
        ("weight", "", "transposed"),
        ("bias", "_bias", "ours"),
    )
    for our_name in ("gate_up", "down"):
        for name, suffix, form in forms:
            yield Weight(
                f"{OUR_LAYER}mlp.{our_name}.{name}",
                f"{HF_LAYER}mlp.experts.{our_name}_proj{suffix}",
                form,
                interleaved=our_name == "gate_up",
            )


ARCHITECTURE = common.architecture(FIELDS, spec, "GptOssForCausalLM", weights)
