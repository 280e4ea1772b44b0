"""olmo_hybrid is Hugging Face's OlmoHybridForCausalLM: OLMo 3's attention in one of four layers,
the gated delta rule between norms of the branches' inputs in the others.
"""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from zero_tp.base.constants import MODEL_KEY
from zero_tp.base.errors import ConfigError
from zero_tp.model.architectures import common, llama_names, qwen3_next
from zero_tp.model.architectures.delta_names import delta_weights, mixer_weights
from zero_tp.model.architectures.llama_names import HF_LAYER, OUR_LAYER
from zero_tp.model.architectures.rotary import rotaries
from zero_tp.model.architectures.spec import TransformerSpec
from zero_tp.model.architectures.table import Architecture, Weight

OUTPUT_NORM_EPSILON = 1e-5
"""The class has no field for it."""

FIELDS = common.fields(
    sizes=tuple(name for name in qwen3_next.SIZES if name != "head_dim"),
    positive=("linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    choices=qwen3_next.CHOICES,
    read=(
        "pad_token_id",
        "attention_bias",
        "linear_a_log_min",
        "linear_a_log_max",
        "linear_allow_neg_eigval",
    ),
)


def _check_ranges(config: PretrainedConfig) -> None:
    """Check the ranges of which a new model's decays and steps are drawn."""
    for first, last in (
        ("linear_a_log_min", "linear_a_log_max"),
        ("linear_dt_min", "linear_dt_max"),
    ):
        low, high = getattr(config, first), getattr(config, last)
        if low < 0:
            raise ConfigError(f"{MODEL_KEY}.{first}", f"{low:g} is negative", "give 0 or more")
        if high < low or high == 0:
            problem = f"{high:g} is the end of a range that begins at {low:g}"
            raise ConfigError(f"{MODEL_KEY}.{last}", problem, "give more, and more than 0")


def spec(config: PretrainedConfig) -> TransformerSpec:
    """Return Llama's spec with this architecture's differences."""
    _check_ranges(config)
    mixers = qwen3_next.mixers(config)
    # Published models rotate nothing.
    rotates = (config.rope_parameters or {}).get("rope_theta") is not None
    nothing = (None,) * config.num_hidden_layers
    of_layers = {"gated_delta": "sequential", "attention": "output_norm"}
    return common.spec(
        config,
        norm="wide_rms_norm",
        query_key_norm="whole",
        rotaries=rotaries(config, common.head_size_of(config), arithmetic="fp32")
        if rotates
        else nothing,
        mixers=mixers,
        mixed_layers=tuple(of_layers[mixer] for mixer in mixers),
        gated_delta=qwen3_next.gated_delta(
            config,
            norm_epsilon=OUTPUT_NORM_EPSILON,
            largest_beta=2.0 if config.linear_allow_neg_eigval else 1.0,
            initial_decay=(config.linear_a_log_min, config.linear_a_log_max),
            initial_step=(
                config.linear_dt_min,
                config.linear_dt_max,
                config.linear_dt_init_floor,
            ),
        ),
    )


NORMS: dict[str, dict[str, tuple[str, str | None]]] = {
    "gated_delta": {
        "attention_norm": ("attention_layer_norm", "input_layernorm"),
        "mlp_norm": ("feedforward_layer_norm", "post_attention_layernorm"),
    },
    "attention": {
        "attention_output_norm": ("feedforward_layer_norm", "post_attention_layernorm"),
        "mlp_output_norm": ("post_feedforward_layernorm", None),
    },
}
"""Mixer of a layer → our names of its norms → (the name in files, that in the class)."""
OLDER_NAMES = {
    f".{in_class}.weight": f".{in_files}.weight"
    for in_files, in_class in NORMS["gated_delta"].values()
}
"""Files may have the class's names."""


def norm_weights(spec: TransformerSpec) -> Iterator[Weight]:
    """Yield the weights of the layers' norms."""
    for mixer, norms in NORMS.items():
        for our_name, (in_files, in_class) in norms.items():
            yield Weight(
                f"{OUR_LAYER}{our_name}.weight",
                f"{HF_LAYER}{in_files}.weight",
                native_name=in_class and f"{HF_LAYER}{in_class}.weight",
                layers=spec.mixed_by(mixer),
            )


def weights(spec: TransformerSpec) -> tuple[Weight, ...]:
    """Return every parameter of a model of this spec."""
    delta = spec.gated_delta
    assert delta is not None
    sizes = (delta.keys, delta.keys, delta.values, delta.values)
    names = tuple(f"linear_attn.{letter}_proj.weight" for letter in "qkvg")
    projection = (
        Weight("attention.projection.qkvz", names, sizes=sizes),
        Weight(
            "attention.projection.gates",
            ("linear_attn.b_proj.weight", "linear_attn.a_proj.weight"),
        ),
    )
    convolution = Weight(
        "attention.convolution.weight",
        tuple(f"linear_attn.{letter}_conv1d.weight" for letter in "qkv"),
        sizes=sizes[:3],
        native_name="linear_attn.conv1d.weight",
    )
    of_delta = delta_weights(projection, convolution, norm="o_norm", output="o_proj")
    listed = llama_names.weights(spec, mixer_weights(spec, of_delta), norms={})
    return (*listed, *norm_weights(spec))


ARCHITECTURE = Architecture(
    fields=FIELDS,
    translate=spec,
    weights=weights,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    native_class="OlmoHybridForCausalLM",
    base_prefix="model.",
    obsolete_suffixes=OLDER_NAMES,
)
