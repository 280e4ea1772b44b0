"""The weights of Llama and its relatives under our names and Hugging Face's.

An architecture passes what differs, or replaces whole parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Form, Weight
from zero_tp.model.norm import NORMS

OUR_LAYER = "transformer.layers.{layer}."
HF_LAYER = "model.layers.{layer}."


def module_weights(
    our_name: str, *hf_names: str, bias: bool = True, transposed: bool = False, **attributes: Any
) -> Iterator[Weight]:
    """Yield weight and bias of a norm or linear layer. Several Hugging Face modules may be one
    fused module here.

    Args:
        transposed: Hugging Face stores [in, out].
        attributes: see Weight.
    """
    for name in ("weight", "bias") if bias else ("weight",):
        names = tuple(f"{module}.{name}" for module in hf_names)
        form: Form = "transposed" if transposed and name == "weight" else "ours"
        yield Weight(f"{our_name}.{name}", names, form, **attributes)


def layer_weights(
    our_name: str, *hf_names: str, bias: bool, layers: tuple[int, ...] | None = None
) -> Iterator[Weight]:
    """Yield `module_weights` of every layer. Names are relative to the layer."""
    yield from module_weights(
        OUR_LAYER + our_name, *(HF_LAYER + name for name in hf_names), bias=bias, layers=layers
    )


NORM_NAMES = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""Norms of Llama's layers: our name → Hugging Face's."""
OUTPUT_NORM_NAMES = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""Those of the layer "output_norm"."""
SANDWICH_NORM_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    **OUTPUT_NORM_NAMES,
}
"""Those of the layer "sandwich", as Gemma names them."""


def norm_weights(spec: TransformerSpec, our_name: str, hf_name: str) -> Iterator[Weight]:
    """Yield the parameters that one of the spec's norms has."""
    for name in NORMS[spec.norm].parameter_names:
        yield Weight(f"{our_name}.{name}", f"{hf_name}.{name}")


EMBEDDING = Weight("transformer.embedding.word.weight", "model.embed_tokens.weight")
HEAD = Weight("head.weight", "lm_head.weight")


def attention_weights(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield the weights of `self_attn` in every layer."""
    queries, keys, values = (f"self_attn.{letter}_proj" for letter in "qkv")
    if spec.fuses_qkv:
        yield from layer_weights("attention.qkv", queries, keys, values, bias=spec.qkv_bias)
    else:
        for our_name, hf_name in (("query", queries), ("key", keys), ("value", values)):
            yield Weight(f"{OUR_LAYER}attention.qkv.{our_name}", f"{HF_LAYER}{hf_name}.weight")
            if spec.qkv_bias:
                yield Weight(
                    f"{OUR_LAYER}attention.qkv.{our_name}_bias", f"{HF_LAYER}{hf_name}.bias"
                )
    if spec.query_key_norm != "none":
        for our_name, hf_name in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            names = f"{OUR_LAYER}attention.{our_name}", f"{HF_LAYER}self_attn.{hf_name}"
            yield from norm_weights(spec, *names)
    yield from layer_weights("attention.output", "self_attn.o_proj", bias=spec.output_bias)


GATED_MLP = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""The linear layers of Llama's MLP: our name → Hugging Face's."""


def expert_weights(
    spec: TransformerSpec,
    block: str,
    linears: Mapping[str, tuple[str, ...]],
    shared: str,
    correction_bias: str,
    native_correction_bias: str,
) -> Iterator[Weight]:
    """Yield the weights of routers and experts: files have one tensor an expert, transformers'
    classes stack them.
    """
    assert spec.experts is not None
    count = spec.experts.count
    layers = spec.expert_layers
    router = f"{OUR_LAYER}mlp.router.weight"
    yield Weight(
        router,
        f"{HF_LAYER}{block}.gate.weight",
        native_name=f"{HF_LAYER}mlp.gate.weight",
        layers=layers,
    )
    if correction_bias:
        yield Weight(
            f"{OUR_LAYER}mlp.router.correction_bias",
            f"{HF_LAYER}mlp.{correction_bias}",
            native_name=f"{HF_LAYER}mlp.{native_correction_bias}"
            if native_correction_bias
            else None,
            is_parameter=False,
            dtype=torch.float32,
            layers=layers,
        )
    for our_name, names in linears.items():
        experts = [f"{HF_LAYER}{block}.experts.{number}" for number in range(count)]
        # In the order of our rows: gate and up of expert 0, gate and up of expert 1, and so on.
        matrices = tuple(f"{expert}.{name}.weight" for expert in experts for name in names)
        stacked = f"{HF_LAYER}mlp.experts.{our_name}_proj"
        yield Weight(
            f"{OUR_LAYER}mlp.{our_name}.weight",
            matrices,
            experts=count,
            native_name=stacked,
            layers=layers,
        )
    if spec.experts.shared:
        for our_name, hf_names in GATED_MLP.items():
            names = tuple(f"mlp.{shared}.{name}" for name in hf_names)
            yield from layer_weights(f"mlp.shared.{our_name}", *names, bias=False, layers=layers)
        if spec.experts.shared_gate:
            gate = f"{HF_LAYER}mlp.{shared}_gate.weight"
            yield Weight(f"{OUR_LAYER}mlp.shared.gate", gate, layers=layers)


def weights(
    spec: TransformerSpec,
    attention: Iterable[Weight] | None = None,
    mlp: Mapping[str, tuple[str, ...]] = GATED_MLP,
    *,
    norms: Mapping[str, str] = NORM_NAMES,
    block: str = "mlp",
    linears: Mapping[str, tuple[str, ...]] = GATED_MLP,
    shared: str = "shared_expert",
    correction_bias: str = "",
    native_correction_bias: str = "",
) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec.

    Args:
        attention: the weights of `self_attn`; by default Llama's.
        mlp: linear layers of dense MLPs, our name → Hugging Face's.
        norms: those of a layer, our name → Hugging Face's.
        block: name of the mixture of experts in files, such as `block_sparse_moe`.
        linears: linear layers of one expert, our name → Hugging Face's.
        shared: name of the shared expert in a layer's MLP.
        correction_bias: name of the routers' bias in a layer's MLP; empty if they have none.
        native_correction_bias: its name in the class, if that differs.
    """
    listed = [EMBEDDING]
    listed += attention_weights(spec) if attention is None else attention
    for our_name, hf_name in norms.items():
        listed += norm_weights(spec, OUR_LAYER + our_name, HF_LAYER + hf_name)
    for our_name, hf_names in mlp.items():
        names = (f"mlp.{name}" for name in hf_names)
        listed += layer_weights(
            f"mlp.{our_name}", *names, bias=spec.mlp_bias, layers=spec.dense_layers
        )
    listed += [*norm_weights(spec, "transformer.final_norm", "model.norm"), HEAD]
    if spec.experts is not None:
        biases = (correction_bias, native_correction_bias)
        listed += expert_weights(spec, block, linears, shared, *biases)
    return tuple(listed)
