"""The weights of layers with the gated delta rule under our names and Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from zero_tp.model.architectures import llama_names
from zero_tp.model.architectures.llama_names import HF_LAYER, OUR_LAYER
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Weight


def of_layers(weights: Iterable[Weight], layers: tuple[int, ...]) -> Iterator[Weight]:
    """Yield the weights as those of these layers alone."""
    for weight in weights:
        yield replace(weight, layers=layers)


def grouped_projection(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield Qwen3-Next's projections: of each key head its query, key, values and gates."""
    delta = spec.gated_delta
    assert delta is not None
    heads = delta.key_heads
    per_key = delta.value_heads // heads
    values = per_key * delta.value_size
    rows = (delta.key_size, delta.key_size, values, values)
    for our_name, name, head_rows in (("qkvz", "qkvz", rows), ("gates", "ba", (per_key,) * 2)):
        yield Weight(
            f"attention.projection.{our_name}",
            f"linear_attn.in_proj_{name}.weight",
            heads=heads,
            head_rows=head_rows,
        )


def joined_projection(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield Qwen3.5's projections: Q, K and V are one tensor."""
    delta = spec.gated_delta
    assert delta is not None
    sizes = (2 * delta.keys + delta.values, delta.values)
    names = tuple(f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z"))
    yield Weight("attention.projection.qkvz", names, sizes=sizes)
    gates = tuple(f"linear_attn.in_proj_{name}.weight" for name in "ba")
    yield Weight("attention.projection.gates", gates)


CONVOLUTION = Weight("attention.convolution.weight", "linear_attn.conv1d.weight")


def delta_weights(
    projection: Iterable[Weight],
    convolution: Weight = CONVOLUTION,
    *,
    norm: str = "norm",
    output: str = "out_proj",
) -> Iterator[Weight]:
    """Yield the weights of `linear_attn`, named relative to the layer.

    Args:
        norm, output: names of the output's norm and projection.
    """
    yield from projection
    yield convolution
    for name in ("A_log", "dt_bias"):
        yield Weight(f"attention.{name}", f"linear_attn.{name}")
    yield Weight("attention.norm.weight", f"linear_attn.{norm}.weight")
    yield Weight("attention.output.weight", f"linear_attn.{output}.weight")


def mixer_weights(spec: TransformerSpec, of_delta: Iterable[Weight]) -> Iterator[Weight]:
    """Yield the weights of `self_attn` and of `linear_attn` in the layers that have them.

    Args:
        of_delta: those of `linear_attn`, named relative to the layer.
    """
    yield from of_layers(llama_names.attention_weights(spec), spec.mixed_by("attention"))
    in_layer = (
        replace(
            weight,
            our_name=OUR_LAYER + weight.our_name,
            hf_name=tuple(HF_LAYER + name for name in weight.names),
            native_name=weight.native_name and HF_LAYER + weight.native_name,
        )
        for weight in of_delta
    )
    yield from of_layers(in_layer, spec.mixed_by("gated_delta"))
